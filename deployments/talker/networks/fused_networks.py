"""Triton networks for GPUs, equivalent to `UnfusedNetworks` but with a tenth of the kernel launches.

For an entire frame, the code predictor is one chain of kernels, with no other work between two codebooks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.gpu.launch import is_hopper
from deployments.talker.kernels.matmul import Activations, Product, like_rows, matmul
from deployments.talker.kernels.paged_attention import PromptAttention, choose_attention
from deployments.talker.kernels.readings import AlignmentReader
from deployments.talker.kernels.state_kernels import SamplingInputs, StateKernels
from deployments.talker.model.input_tables import InputTables
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.model.talker import Talker
from deployments.talker.networks.frame_networks import MIN_NEW_TOKENS, NOT_FINITE, FrameNetworks, NetworkKind
from deployments.talker.networks.fused_stack import FrameCache, FusedStack, PackedStack, fold_norm
from deployments.talker.networks.plain_networks import run_together
from deployments.talker.sampling.torch_sampler import NoiseKey
from deployments.talker.sampling.triton_sampler import (
    Embeddings,
    FirstCodeRules,
    FrameOutputs,
    begin_frame,
    sample_code,
    sample_first_code,
)
from deployments.talker.state.batch_state import WIDE, BatchOptions, BatchState, Breadth, Context
from deployments.talker.state.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class PackedPredictor:
    """Weights of a talker's `CodePredictor` in the layout that the kernels expect."""

    config: ModelConfig
    stack: PackedStack
    heads: list[Tensor]  # for codebooks 1 and up: [vocab, hidden], with the final norm folded in
    projection: torch.nn.Module  # from the talker's hidden size to the predictor's
    tables: list[Embeddings]  # for codebooks 0 and up

    @classmethod
    @torch.no_grad()
    def pack_in_place(cls, talker: Talker) -> "PackedPredictor":
        """Pack the weights of the predictor in place, as `PackedStack.pack_in_place` does."""
        config, predictor = talker.config, talker.code_predictor
        stack = PackedStack.pack_in_place(predictor.model, config.predictor, positions=config.num_code_groups + 1)
        norm = predictor.model.norm.weight
        heads = [fold_norm(head.weight, norm) for head in predictor.lm_head if isinstance(head, torch.nn.Linear)]
        projection = predictor.small_to_mtp_projection
        tables = [talker.model.codec_embedding, *predictor.embeddings]
        embeddings = [Embeddings(projection(table.weight), table.weight.detach()) for table in tables]
        return cls(config, stack, heads, projection, embeddings)


class FusedPredictor:
    """Predicts a complete frame and its embedding sum from the talker's hidden state and codebook 0. Not reentrant."""

    def __init__(self, weights: PackedPredictor, *, max_rows: int, pdl: bool = True) -> None:
        """Allocate buffers. Concurrent predictors may share `weights`."""
        self.heads, self.tables, self._projection = weights.heads, weights.tables, weights.projection
        config, like = weights.config, self.heads[0]
        self.groups, self.pdl, self.eps = config.num_code_groups, pdl, config.predictor.rms_norm_eps
        self.stack = FusedStack(weights.stack, max_rows=2 * max_rows, pdl=pdl)
        self.cache = FrameCache(config.predictor, num_rows=max_rows, positions=self.groups, like=like)
        hidden = config.talker.hidden_size
        self._logits = like_rows(max_rows, config.code_vocab_size, like)
        self._first = like_rows(2 * max_rows, config.predictor.hidden_size, like)
        self._outputs = FrameOutputs(
            codes=torch.zeros((max_rows, self.groups), dtype=torch.long, device=like.device),
            sums=torch.empty((max_rows, hidden), dtype=torch.float32, device=like.device),
            total=torch.empty((max_rows, hidden), dtype=like.dtype, device=like.device),
        )

    @property
    def totals(self) -> Tensor:
        """Embedding sums of the last `predict_frame`, [max rows, talker hidden]."""
        return self._outputs.total

    def predict_frame(self, hidden: Tensor, code0: Tensor, options: BatchOptions, noise_key: NoiseKey) -> Tensor:
        """Run `CodePredictor.forward` in kernels. Returns codes [rows, groups], and stores embedding sums in `totals`.

        `hidden` [rows, talker hidden] is the output of the final norm. `noise_key.codebook` is ignored. Kernels read
        seeds and frame numbers before earlier kernels of the chain have finished, so these kernels must not write them.
        The result is valid until the next call.
        """
        num_rows = len(code0)
        outputs = FrameOutputs(
            *(tensor[:num_rows] for tensor in (self._outputs.codes, self._outputs.sums, self._outputs.total))
        )
        state = self._start(hidden, code0, outputs)
        inputs = self.stack.input_rows(num_rows)
        for group in range(1, self.groups):
            if group > 1:
                state = self.stack.codebook_step(inputs, group, self.cache)
            logits = self._head(state, group)
            group_draw = NoiseKey(noise_key.seeds, noise_key.frames, group)
            sample_code(logits, options, group_draw, self.tables[group], inputs, outputs, pdl=self.pdl)
        return outputs.codes

    def _start(self, hidden: Tensor, code0: Tensor, outputs: FrameOutputs) -> Activations:
        """Run the first two positions, the talker's hidden state and codebook 0. Returns the second one's rows."""
        num_rows = len(hidden)
        both = Activations(self._first.values[: 2 * num_rows], self._first.squares, 1)
        self._enter_stack(hidden, both)
        begin_frame(code0, self.tables[0], both, outputs)
        done = self.stack.frame_start(both, self.cache)
        return Activations(done.values[num_rows:], done.squares[:, num_rows:], done.parts)

    def _enter_stack(self, hidden: Tensor, out: Activations) -> None:
        """Write the talker's hidden states to the first rows of `out`, with a plain launch after an unknown kernel."""
        if isinstance(self._projection, torch.nn.Identity):
            out.values[: len(hidden)].copy_(hidden)
            return
        weight, bias = self._projection.weight, self._projection.bias
        assert isinstance(weight, Tensor)
        assert isinstance(bias, Tensor)
        matmul(hidden, weight, Activations(out.values[: len(hidden)], out.squares, 1), Product(), bias=bias)

    def _head(self, state: Activations, group: int) -> Tensor:
        out = Activations(self._logits.values[: len(state.values)], self._logits.squares, 1)
        matmul(state, self.heads[group - 1], out, Product(eps=self.eps, pdl=self.pdl))
        return out.values


class FusedNetworks(FrameNetworks):
    """Networks of the `fused` kind, for decoding steps and prompts. A long prompt's later passes run in PyTorch.

    If `pdl` is set, results depend on the order of launches. See `FusedStack`.
    """

    kind: NetworkKind = "fused"
    breadths = (WIDE,)

    def __init__(self, tables: InputTables, state: BatchState, cache: KVCache, *, attention: str) -> None:
        """Pack the talker's weights in place. The talker then reads the packed weights, with identical results."""
        talker, self.pdl, self._attention = tables.talker, is_hopper(tables.device), attention
        positions = state.size.max_model_len
        self._packed_stack = PackedStack.pack_in_place(talker.model, talker.config.talker, positions=positions)
        self._packed_predictor = PackedPredictor.pack_in_place(talker)
        super().__init__(tables, state, cache, attention=attention)

    def _make_buffers(self, *, num_rows: int, num_positions: int) -> None:
        super()._make_buffers(num_rows=num_rows, num_positions=num_positions)
        tables, pdl = self.tables, self.pdl
        self.stack = FusedStack(self._packed_stack, max_rows=max(num_rows, num_positions), pdl=pdl)
        self.predictor = FusedPredictor(self._packed_predictor, max_rows=num_rows, pdl=pdl)
        self.attention = choose_attention(  # it owns a counter of finished programs
            self._attention, self.stack.heads, block_size=self.cache.block_size, dtype=tables.dtype, pdl=pdl
        )
        self.kernels = StateKernels(self.state, tables.text, padding=tables.pad, num_rows=num_rows)
        # `predict_frame` writes the sums to this buffer, and `advance` reads them without a copy.
        self._embeds = self.predictor.totals
        self._code0 = torch.zeros(num_rows, dtype=torch.long, device=tables.device)
        self._logits = like_rows(num_rows, self.config.vocab_size, self.talker.codec_head.weight)

    @property
    def name(self) -> str:
        return f"{self.kind}, attention: {self.attention.name}"

    def predict(self, rows: Tensor, breadth: Breadth) -> None:  # one kernel supports all breadths
        gathered = self.kernels.gather(rows)
        noise_key = NoiseKey(gathered.seeds, gathered.frames, 0)
        code0 = self._first_codes(rows, gathered, noise_key)
        codes = self.predictor.predict_frame(gathered.hidden, code0, gathered.predictor_options, noise_key)
        self.kernels.store_codes(codes, gathered.is_finite, self.codes, not_finite=NOT_FINITE)

    def advance(self, rows: Tensor, *, length: int) -> None:
        inputs, context = self.kernels.talker_inputs(rows, self._embeds[: len(rows)])
        hidden = self.stack.talker_step(inputs, context, self.cache, self.attention, self._alignment_reader(rows))
        self.kernels.store_hidden(rows, hidden)

    def _run_prompt(self, owners: Tensor, inputs: Tensor, context: Context, length: int) -> Tensor:
        if length:
            return run_together(self, owners, inputs, context, length)
        return self.stack.talker_step(inputs, context, self.cache, PromptAttention(self.stack.heads, owners, self.pdl))

    def _embed(self, frames: Tensor) -> Tensor:
        first, *rest = (table.summed[frames[:, group]] for group, table in enumerate(self.predictor.tables))
        total = first.float()
        for embeds in rest:
            total = total + embeds.float()
        return total.to(first.dtype)

    def _alignment_reader(self, rows: Tensor) -> AlignmentReader | None:
        if (followed := self.config.text.alignment_head) is None:
            return None
        return AlignmentReader(*followed, self.stack.heads, self.state, rows, self.readings[: len(rows)], self.pdl)

    def _first_codes(self, rows: Tensor, gathered: SamplingInputs, noise_key: NoiseKey) -> Tensor:
        rules = FirstCodeRules(
            state_rows=rows,
            seen=self.state.seen,
            penalty=gathered.penalty,
            suppressed=self.talker.suppressed,
            ignore_eos=gathered.ignore_eos,
            eos=self.config.codes.eos,
            min_new_tokens=MIN_NEW_TOKENS,
        )
        logits = self._first_logits(gathered.hidden)
        code0 = self._code0[: len(rows)]
        sample_first_code(logits, gathered.talker_options, noise_key, rules, code0, pdl=self.pdl)
        return code0

    def _first_logits(self, hidden: Tensor) -> Tensor:
        """Return logits for codebook 0 [rows, vocab]. cuBLAS would select a kernel based on the number of rows."""
        out = Activations(self._logits.values[: len(hidden)], self._logits.squares, 1)
        matmul(hidden, self.talker.codec_head.weight, out, Product(pdl=self.pdl))
        return out.values
