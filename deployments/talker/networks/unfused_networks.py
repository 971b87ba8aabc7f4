"""Networks with sampling and row state in PyTorch: the base class for all kinds except `fused`."""

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from deployments.talker.networks.frame_networks import MIN_NEW_TOKENS, NOT_FINITE, FrameNetworks
from deployments.talker.sampling import torch_sampler
from deployments.talker.sampling.torch_sampler import NoiseKey, NoiseSource, apply_repetition_penalty, philox_noise
from deployments.talker.state.batch_state import BatchOptions, Breadth, Context


class UnfusedNetworks(FrameNetworks):
    """Samples codes and updates row state in PyTorch. Each kind adds its passes."""

    noise: NoiseSource = staticmethod(philox_noise)

    @property
    def samples_in_c(self) -> bool:
        """Whether a CPU samples in C. verify's other noise needs PyTorch."""
        return torch_sampler.IN_C and self.noise is philox_noise

    def predict(self, rows: Tensor, breadth: Breadth) -> None:
        state = self.state
        hidden, seeds, frames = state.hidden[rows], state.seeds[rows], state.num_frames[rows].long()
        options = state.predictor_options(rows, breadth)
        code0 = self._sample_code0(rows, hidden, breadth)
        codes, embeds = self._complete(hidden, code0, options, NoiseKey(seeds, frames, 0))
        is_finite = torch.isfinite(hidden).all(-1, keepdim=True)
        self.codes[: len(rows)] = codes.masked_fill(~is_finite, NOT_FINITE)
        self._embeds[: len(rows)] = embeds

    def advance(self, rows: Tensor, *, length: int) -> None:
        state = self.state
        inputs = self._embeds[: len(rows)] + self.tables.text[state.trailing(rows, self.tables.pad)]
        context = self._context(rows, state.positions[rows])
        state.hidden[rows], weights = self._step(inputs, context, length)
        if weights is not None:
            self._read(rows, weights)
        state.move_on(rows)

    @abstractmethod
    def _first_logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits of codebook 0 [rows, vocab]."""

    def _complete(
        self, hidden: Tensor, code0: Tensor, options: BatchOptions, noise_key: NoiseKey
    ) -> tuple[Tensor, Tensor]:
        """Return frames [rows, groups] that begin with `code0`, and the sums [rows, hidden] of their embeddings."""

        def sample(logits: Tensor, codebook: int) -> Tensor:
            return self.choose(logits, options, replace(noise_key, codebook=codebook))

        embed0 = self.talker.model.codec_embedding(code0)
        codes, embeds = self.talker.code_predictor(hidden, code0, embed0, sample=sample)
        return codes, embeds

    @abstractmethod
    def _step(self, inputs: Tensor, context: Context, length: int) -> tuple[Tensor, Tensor | None]:
        """Convert input rows [rows, hidden] to hidden states, and the alignment head's attention [rows, length]."""

    def _sample_code0(self, rows: Tensor, hidden: Tensor, breadth: Breadth) -> Tensor:
        """Sample codebook 0 [rows] int64 of the next frames of state rows [rows] from hidden states [rows, hidden]."""
        state, eos = self.state, self.config.codes.eos
        frames = state.num_frames[rows].long()
        logits = apply_repetition_penalty(self._first_logits(hidden), state.seen[rows], state.penalty(rows))
        logits = logits.masked_fill(self.talker.suppressed, -torch.inf)
        too_early = (frames < MIN_NEW_TOKENS) | state.ignore_eos(rows)
        logits[:, eos] = logits[:, eos].masked_fill(too_early, -torch.inf)
        code0 = self.choose(logits, state.talker_options(rows, breadth), NoiseKey(state.seeds[rows], frames, 0))
        state.seen.index_put_((rows, code0), torch.ones_like(code0, dtype=torch.bool))
        return code0

    def choose(self, logits: Tensor, options: BatchOptions, noise_key: NoiseKey) -> Tensor:
        """Sample codes [rows] int64 from float32 logits [rows, vocab]. `sampling/` has a sampler for each device."""
        if logits.is_cpu and self.samples_in_c:
            return torch_sampler.sample_in_c(logits, options, noise_key)
        return torch_sampler.sample(logits, options, noise_key, self.noise)

    def _read(self, rows: Tensor, weights: Tensor) -> None:
        """Compute the `readings` of state rows [rows] from attention weights [rows, length]."""
        start, count = self.state.text(rows)
        token = torch.arange(weights.shape[1], device=weights.device) - start[:, None]
        on_text = weights * ((token >= 0) & (token < count[:, None]))
        self.readings[: len(rows), 0], self.readings[: len(rows), 1] = on_text.sum(-1), (on_text * token).sum(-1)
