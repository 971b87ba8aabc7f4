"""The device's work for a batch, as functions of tensors alone: the two halves of a frame, and prefill.

No function looks at values on the host, so that each can be captured as a CUDA graph; on a CPU the same functions run
as they are. A frame is made in two halves: `predict` samples codebook 0 from the talker's hidden state and lets the
predictor complete the frame, whereupon the codes can leave; `advance` feeds the frame to the talker. A sequence has
ended when codebook 0 is the end of speech; the other codes are no frame then.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from deployments.talker.kernels import cpu_kernels
from deployments.talker.model.layers import attend_rows
from deployments.talker.model.predictor import SampleCode
from deployments.talker.state.batch_state import BatchState, Context
from deployments.talker.state.kv_cache import KVCache
from deployments.talker.state.sampling import (
    NARROW,
    WIDE,
    BatchSampler,
    Breadth,
    Draw,
    NoiseSource,
    penalise_repetition,
    philox_noise,
)
from deployments.talker.text.prompt import InputTables

# This stands in place of a code where the talker's state has become NaN or infinite.
NOT_FINITE = -1
# The official generation never ends speech before this many codes of codebook 0.
MIN_NEW_TOKENS = 2


@dataclass(frozen=True, slots=True)
class PrefillTensors:
    """One prefill pass: positions of any number of sequences, and the sequences that end in it."""

    text_ids: Tensor  # [positions] int32
    codec_ids: Tensor  # [positions] int32
    owners: Tensor  # [positions] int32: the sequences' rows of the state
    positions: Tensor  # [positions] int32: within their sequence
    last: Tensor  # [sequences] int32: which of the positions are the last of their sequence
    finished: Tensor  # [sequences] int32: the sequences' rows of the state; padded with the scratch row


class GatheredAttention:
    """The `Attend` of one pass: writes the rows' keys and values, then gathers each row's context."""

    def __init__(
        self, cache: KVCache, context: Context, length: int, *, followed: tuple[int, int] | None = None
    ) -> None:
        """`followed`: the layer and the head whose weights are kept."""
        self.cache, self.slots, self._followed = cache, context.slots, followed
        self.weights: Tensor | None = None  # [rows, length] float32
        offsets = torch.arange(length, device=context.positions.device)
        blocks = context.block_tables[:, offsets // cache.block_size].long()
        self.mask = (offsets < context.lengths[:, None])[:, None, None]
        self.context = blocks * cache.block_size + offsets % cache.block_size

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots] = key
        values[self.slots] = value
        context = self.context
        seen = keys[context].transpose(1, 2)
        if self._followed is not None and layer == self._followed[0]:
            self.weights = self._weights(query, seen, self._followed[1])
        return attend_rows(query, seen, values[context].transpose(1, 2), self.mask)

    def _weights(self, query: Tensor, keys: Tensor, head: int) -> Tensor:
        """[rows, heads, head_dim], [rows, kv_heads, length, head_dim] -> [rows, length]."""
        head_keys = keys[:, head * keys.shape[1] // query.shape[1]]
        scores: Tensor = (head_keys.float() @ query[:, head, :, None].float())[..., 0] * query.shape[2] ** -0.5
        return scores.masked_fill(~self.mask[:, 0, 0], -torch.inf).softmax(-1)


class SharedAttention:
    """The `Attend` of one pass in which every row looks at the same context, as far as `mask` lets it."""

    def __init__(self, cache: KVCache, slots: Tensor, context: Tensor, mask: Tensor) -> None:
        self.cache, self.slots, self.context, self.mask = cache, slots, context, mask

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots] = key
        values[self.slots] = value
        repeats = query.shape[1] // key.shape[1]
        seen_keys, seen_values = (
            each[self.context].transpose(0, 1).repeat_interleave(repeats, 0) for each in (keys, values)
        )
        queries = query.transpose(0, 1)
        return F.scaled_dot_product_attention(queries, seen_keys, seen_values, attn_mask=self.mask).transpose(0, 1)


class FrameNetworks:
    """The networks of one talker over the state of a batch, in plain PyTorch on any device."""

    breadths: tuple[Breadth, ...] = (NARROW, WIDE)  # breadths that are worth a capture of their own
    pads = True  # whether all passes on a CPU have as many rows, because a row's rounding would depend on their number

    def __init__(
        self, tables: InputTables, state: BatchState, cache: KVCache, *, num_rows: int, by_rows: bool = False
    ) -> None:
        """Those of several lanes have the same tables, state and cache, and buffers of their own for `num_rows` rows.

        `by_rows`: each row attends to a gathered context of its own, wherever the other rows of its pass stand.
        """
        self.tables, self.state, self.cache, self._by_rows = tables, state, cache, by_rows
        self.talker, self.config = tables.talker, tables.talker.config
        self.noise: NoiseSource = philox_noise
        like = state.hidden
        # Results of `predict`, by index in the batch: other CUDA streams may read them after the event of the codes.
        self.codes = torch.zeros((num_rows, self.config.num_code_groups), dtype=torch.int16, device=like.device)
        self.given = torch.zeros_like(self.codes, dtype=torch.int32)  # for `feed_given`, by index in the batch
        # Of the last `advance`, by index in the batch: how much of the alignment head's attention is on the text, and
        # the same times the text positions. Zero if no head is known.
        self.readings = torch.zeros((num_rows, 2), dtype=torch.float32, device=like.device)
        self._embeds = torch.zeros((num_rows, like.shape[1]), dtype=like.dtype, device=like.device)

    @property
    def name(self) -> str:
        return "exact" if self._by_rows else "plain"

    def predict(self, rows: Tensor, breadth: Breadth) -> None:
        """The next frames of state rows [rows] int64 into `codes`."""
        state = self.state
        hidden, seeds, frames = state.hidden[rows], state.seeds[rows], state.frames[rows].long()
        sampler = state.predictor_sampler(rows, breadth)

        def sample(logits: Tensor, codebook: int) -> Tensor:
            return self.choose(sampler, logits, Draw(seeds, frames, codebook))

        codes, embeds = self._complete(hidden, self._sample_code0(rows, hidden, breadth), sample=sample)
        sound = torch.isfinite(hidden).all(-1, keepdim=True)
        self.codes[: len(rows)] = codes.masked_fill(~sound, NOT_FINITE)
        self._embeds[: len(rows)] = embeds

    def feed_given(self, rows: Tensor) -> None:
        """Take the next frames of state rows [rows] from `given`, in place of `predict`."""
        self._embeds[: len(rows)] = self._embed(self.given[: len(rows)].long())

    def advance(self, rows: Tensor, *, length: int) -> None:
        """The talker's step after `predict`; no position is at or beyond `length`."""
        state = self.state
        inputs = self._embeds[: len(rows)] + self.tables.text[state.trailing(rows, self.tables.pad)]
        context = self._context(rows, state.positions[rows])
        state.hidden[rows], weights = self._step(inputs, context, length)
        if weights is not None:
            self._read(rows, weights)
        state.move_on(rows)

    def prefill(self, tensors: PrefillTensors, *, length: int) -> None:
        """Run positions of prompts; the hidden states of last positions become their sequences'.

        `length` 0: each sequence's positions begin at 0. Else all are of one sequence, and none attends beyond `length`
        positions.
        """
        inputs = self.tables.rows(tensors.text_ids, tensors.codec_ids)
        owners = tensors.owners.long()
        context = self._context(owners, tensors.positions)
        run = self._run_rows if self._by_rows else partial(self._run_prompt, owners)
        hidden = run(inputs, context, length)
        self.state.hidden[tensors.finished.long()] = hidden[tensors.last.long()]

    def _embed(self, frames: Tensor) -> Tensor:
        """Sums [rows, hidden] of the embeddings of frames [rows, groups], bit for bit as `predict` adds them."""
        return self.talker.embed_frames(frames)

    def _complete(self, hidden: Tensor, code0: Tensor, *, sample: SampleCode) -> tuple[Tensor, Tensor]:
        """Frames [rows, groups] whose first codes are known, and the sums [rows, hidden] of their embeddings."""
        embed0 = self.talker.model.codec_embedding(code0)
        codes, embeds = self.talker.code_predictor(hidden, code0, embed0, sample=sample)
        return codes, embeds

    def _step(self, inputs: Tensor, context: Context, length: int) -> tuple[Tensor, Tensor | None]:
        """Input rows [rows, hidden] -> hidden states, and the alignment head's attention [rows, length]."""
        attention = GatheredAttention(self.cache, context, length, followed=self.config.text.alignment_head)
        return self.talker(inputs, context.positions, attention), attention.weights

    def _first_logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits of codebook 0 [rows, vocab]."""
        return self.talker.logits(hidden)

    def _sample_code0(self, rows: Tensor, hidden: Tensor, breadth: Breadth) -> Tensor:
        """Codebook 0 [rows] int64 of the next frames of state rows [rows], whose hidden states are [rows, hidden]."""
        state, eos = self.state, self.config.codes.eos
        frames = state.frames[rows].long()
        logits = penalise_repetition(self._first_logits(hidden), state.seen[rows], state.penalty(rows))
        logits = logits.masked_fill(self.talker.suppressed, -torch.inf)
        too_early = (frames < MIN_NEW_TOKENS) | state.ignore_eos(rows)
        logits[:, eos] = logits[:, eos].masked_fill(too_early, -torch.inf)
        code0 = self.choose(state.talker_sampler(rows, breadth), logits, Draw(state.seeds[rows], frames, 0))
        state.seen.index_put_((rows, code0), torch.ones_like(code0, dtype=torch.bool))
        return code0

    def choose(self, sampler: BatchSampler, logits: Tensor, draw: Draw) -> Tensor:
        """Logits [rows, vocab] float32 -> codes [rows] int64, by the kernel for CPUs where it was built."""
        if cpu_kernels.BUILT and logits.is_cpu and self.noise is philox_noise:
            return cpu_kernels.sample(logits, sampler.packed, draw.seeds, draw.frames, draw.codebook)
        return sampler.sample(logits, draw, self.noise)

    def _run_rows(self, inputs: Tensor, context: Context, length: int) -> Tensor:
        """Input rows [rows, hidden] -> hidden states [rows, hidden]; no row attends beyond `length` positions."""
        hidden: Tensor = self.talker(inputs, context.positions, GatheredAttention(self.cache, context, length))
        return hidden

    def _read(self, rows: Tensor, weights: Tensor) -> None:
        """The `readings` of state rows [rows] from attention weights [rows, length]."""
        start, count = self.state.text(rows)
        token = torch.arange(weights.shape[1], device=weights.device) - start[:, None]
        on_text = weights * ((token >= 0) & (token < count[:, None]))
        self.readings[: len(rows), 0], self.readings[: len(rows), 1] = on_text.sum(-1), (on_text * token).sum(-1)

    def _run_prompt(self, owners: Tensor, inputs: Tensor, context: Context, length: int) -> Tensor:
        """`_run_rows` with all rows over one context: that of the pass itself, or that of one sequence."""
        positions = context.positions
        if length:
            offsets = torch.arange(length, device=positions.device)
            seen = context.block_tables[0, offsets // self.cache.block_size].long() * self.cache.block_size
            seen = seen + offsets % self.cache.block_size
            mask = offsets <= positions[:, None]
        else:
            seen = context.slots
            mask = (owners[:, None] == owners) & (positions <= positions[:, None])
        hidden: Tensor = self.talker(inputs, positions, SharedAttention(self.cache, context.slots, seen, mask))
        return hidden

    def _context(self, owners: Tensor, positions: Tensor) -> Context:
        state = self.state
        return Context(
            positions=positions,
            slots=state.slots(owners, positions),
            block_tables=state.block_tables[owners],
            lengths=positions + 1,
        )
