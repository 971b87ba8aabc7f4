"""The networks in Triton, on a GPU: what `UnfusedNetworks` compute, in a tenth of the launches.

The code predictor of a whole frame is one chain of kernels: nothing else runs between two codebooks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.gpu.launch import launches_early
from deployments.talker.kernels.matmul import Activations, Product, like_rows, matmul
from deployments.talker.kernels.paged_attention import PromptAttention, choose_attention
from deployments.talker.kernels.readings import AlignmentReader
from deployments.talker.kernels.state_kernels import Gathered, StateKernels
from deployments.talker.model.input_tables import InputTables
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.model.talker import Talker
from deployments.talker.networks.frame_networks import MIN_NEW_TOKENS, NOT_FINITE, FrameNetworks, NetworkKind
from deployments.talker.networks.fused_stack import FrameCache, FusedStack, PackedStack, fold_norm
from deployments.talker.networks.plain_networks import run_together
from deployments.talker.sampling.torch_sampler import Draw
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
    """The weights of a talker's `CodePredictor` as the kernels read them."""

    config: ModelConfig
    stack: PackedStack
    heads: list[Tensor]  # of codebook 1 and on: [vocab, hidden], the final norm folded in
    projection: torch.nn.Module  # from the talker's hidden size to the predictor's
    tables: list[Embeddings]  # of codebook 0 and on

    @classmethod
    @torch.no_grad()
    def pack_in_place(cls, talker: Talker) -> "PackedPredictor":
        """As `PackedStack.pack_in_place` does with the predictor's stack."""
        config, predictor = talker.config, talker.code_predictor
        stack = PackedStack.pack_in_place(predictor.model, config.predictor, positions=config.num_code_groups + 1)
        norm = predictor.model.norm.weight
        heads = [fold_norm(head.weight, norm) for head in predictor.lm_head if isinstance(head, torch.nn.Linear)]
        projection = predictor.small_to_mtp_projection
        tables = [talker.model.codec_embedding, *predictor.embeddings]
        embeddings = [Embeddings(projection(table.weight), table.weight.detach()) for table in tables]
        return cls(config, stack, heads, projection, embeddings)


class FusedPredictor:
    """Makes a frame, and the sum of its embeddings, of the talker's hidden state and codebook 0. Not reentrant."""

    def __init__(self, weights: PackedPredictor, *, max_rows: int, pdl: bool = True) -> None:
        """`weights` may belong to other predictors too, which may run at the same time."""
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
        """[max rows, talker hidden]: where `predict_frame` leaves its sums."""
        return self._outputs.total

    def predict_frame(self, hidden: Tensor, code0: Tensor, options: BatchOptions, draw: Draw) -> Tensor:
        """`CodePredictor.forward` in kernels: codes [rows, groups]. The sums of their embeddings are left in `totals`.

        `hidden` [rows, talker hidden] follows the final norm; `draw.codebook` is ignored. Seeds and frame numbers are
        read before earlier kernels of the chain end, so they must not be written by one. Valid until the next call.
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
            group_draw = Draw(draw.seeds, draw.frames, group)
            sample_code(logits, options, group_draw, self.tables[group], inputs, outputs, pdl=self.pdl)
        return outputs.codes

    def _start(self, hidden: Tensor, code0: Tensor, outputs: FrameOutputs) -> Activations:
        """The first two positions: the talker's hidden state and codebook 0. Returns the rows of the second."""
        num_rows = len(hidden)
        both = Activations(self._first.values[: 2 * num_rows], self._first.squares, 1)
        self._enter_stack(hidden, both)
        begin_frame(code0, self.tables[0], both, outputs)
        done = self.stack.frame_start(both, self.cache)
        return Activations(done.values[num_rows:], done.squares[:, num_rows:], done.parts)

    def _enter_stack(self, hidden: Tensor, out: Activations) -> None:
        """The talker's hidden states become the first rows of `out`. Launched plainly: the kernel before is unknown."""
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
    """The `fused` kind: all of a decoding step, and prompts. The later passes of a long prompt are plain.

    With `pdl` the order of the launches is a part of the result: see `FusedStack`.
    """

    kind: NetworkKind = "fused"
    breadths = (WIDE,)

    def __init__(self, tables: InputTables, state: BatchState, cache: KVCache, *, attention: str) -> None:
        """The talker reads the packed weights from now on, and computes the same: see `PackedStack.pack_in_place`."""
        talker, self.pdl, self._attention = tables.talker, launches_early(tables.device), attention
        positions = state.size.max_model_len
        self._packed_stack = PackedStack.pack_in_place(talker.model, talker.config.talker, positions=positions)
        self._packed_predictor = PackedPredictor.pack_in_place(talker)
        super().__init__(tables, state, cache, attention=attention)

    def _make_buffers(self, *, num_rows: int, num_positions: int) -> None:
        super()._make_buffers(num_rows=num_rows, num_positions=num_positions)
        tables, pdl = self.tables, self.pdl
        self.stack = FusedStack(self._packed_stack, max_rows=max(num_rows, num_positions), pdl=pdl)
        self.predictor = FusedPredictor(self._packed_predictor, max_rows=num_rows, pdl=pdl)
        self.attention = choose_attention(  # it counts the programs that have come, in memory of its own
            self._attention, self.stack.heads, block_size=self.cache.block_size, dtype=tables.dtype, pdl=pdl
        )
        self.kernels = StateKernels(self.state, tables.text, padding=tables.pad, num_rows=num_rows)
        # `predict` has `predict_frame` write these sums, and `advance` reads them: one buffer, no copy between.
        self._embeds = self.predictor.totals
        self._code0 = torch.zeros(num_rows, dtype=torch.long, device=tables.device)
        self._logits = like_rows(num_rows, self.config.vocab_size, self.talker.codec_head.weight)

    @property
    def name(self) -> str:
        return f"{self.kind}, attention: {self.attention.name}"

    def predict(self, rows: Tensor, breadth: Breadth) -> None:  # one kernel serves every breadth
        gathered = self.kernels.gather(rows)
        draw = Draw(gathered.seeds, gathered.frames, 0)
        code0 = self._first_codes(rows, gathered, draw)
        codes = self.predictor.predict_frame(gathered.hidden, code0, gathered.predictor_options, draw)
        self.kernels.deliver(codes, gathered.sound, self.codes, not_finite=NOT_FINITE)

    def advance(self, rows: Tensor, *, length: int) -> None:
        inputs, context = self.kernels.feed(rows, self._embeds[: len(rows)])
        hidden = self.stack.talker_step(inputs, context, self.cache, self.attention, self._alignment_reader(rows))
        self.kernels.settle(rows, hidden)

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

    def _first_codes(self, rows: Tensor, gathered: Gathered, draw: Draw) -> Tensor:
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
        sample_first_code(logits, gathered.talker_options, draw, rules, code0, pdl=self.pdl)
        return code0

    def _first_logits(self, hidden: Tensor) -> Tensor:
        """Logits of codebook 0 [rows, vocab]; the library would choose its kernel by the number of rows."""
        out = Activations(self._logits.values[: len(hidden)], self._logits.squares, 1)
        matmul(hidden, self.talker.codec_head.weight, out, Product(pdl=self.pdl))
        return out.values
