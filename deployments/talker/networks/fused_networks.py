"""The networks in Triton, on a GPU: the same functions as `PlainNetworks`, in a tenth of the launches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.talker.kernels.matmul import Activations, Product, like_rows, matmul
from deployments.talker.kernels.paged_attention import choose_attention
from deployments.talker.kernels.prompt_attention import PromptAttention
from deployments.talker.kernels.readings import AlignmentReader
from deployments.talker.kernels.state_kernels import Gathered, StateKernels
from deployments.talker.model.talker import Talker
from deployments.talker.networks.frame_networks import MIN_NEW_TOKENS, NOT_FINITE, NetworkKind, PrefillTensors
from deployments.talker.networks.fused_predictor import FusedPredictor, PackedPredictor
from deployments.talker.networks.fused_stack import FusedStack, PackedStack
from deployments.talker.networks.plain_networks import PlainNetworks
from deployments.talker.sampling.torch_sampler import Draw
from deployments.talker.sampling.triton_sampler import FirstCodeRules, sample_first_code
from deployments.talker.state.batch_state import WIDE, BatchState, Breadth
from deployments.talker.state.kv_cache import KVCache
from deployments.talker.text.prompt import InputTables


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """The weights that a step and the lanes share, and how their kernels run."""

    stack: PackedStack
    predictor: PackedPredictor
    attention: str  # for `choose_attention`
    pdl: bool

    @classmethod
    def pack_in_place(cls, talker: Talker, *, positions: int, attention: str, pdl: bool) -> "FusedWeights":
        """The talker reads the packed weights from now on, and computes the same: see `PackedStack.pack_in_place`."""
        stack = PackedStack.pack_in_place(talker.model, talker.config.talker, positions=positions)
        return cls(stack, PackedPredictor.pack_in_place(talker), attention, pdl)


class FusedNetworks(PlainNetworks):
    """The `fused` kind: all of a decoding step, and prompts. The later passes of a long prompt are plain.

    With `pdl` the order of the launches is a part of the result: see `FusedStack`.
    """

    kind: NetworkKind = "fused"
    breadths = (WIDE,)

    def __init__(
        self,
        tables: InputTables,
        state: BatchState,
        cache: KVCache,
        weights: FusedWeights,
        *,
        num_rows: int,
        num_positions: int,
    ) -> None:
        """Steps have at most `num_rows` rows, prefill passes at most `num_positions` positions."""
        super().__init__(tables, state, cache, num_rows=num_rows)
        self.pdl = pdl = weights.pdl
        self.stack = FusedStack(weights.stack, max_rows=max(num_rows, num_positions), pdl=pdl)
        self.predictor = FusedPredictor(weights.predictor, max_rows=num_rows, pdl=pdl)
        self.attention = choose_attention(  # it counts the programs that have come, in memory of its own
            weights.attention, self.stack.heads, block_size=cache.block_size, dtype=tables.dtype, pdl=pdl
        )
        self.kernels = StateKernels(state, tables.text, padding=tables.pad, num_rows=num_rows)
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

    def prefill(self, tensors: PrefillTensors, *, length: int) -> None:
        if length:
            super().prefill(tensors, length=length)
            return
        owners = tensors.owners.long()
        context = self._context(owners, tensors.positions)
        inputs = self.tables.rows(tensors.text_ids, tensors.codec_ids)
        attention = PromptAttention(self.stack.heads, owners, self.pdl)
        hidden = self.stack.talker_step(inputs, context, self.cache, attention)
        self.state.hidden[tensors.finished.long()] = hidden[tensors.last.long()]

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
