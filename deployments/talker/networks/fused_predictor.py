"""The code predictor of a whole frame as one chain of kernels: nothing else runs between two codebooks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.talker.kernels.matmul import Activations, Product, like_rows, matmul
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.model.talker import Talker
from deployments.talker.networks.fused_stack import FrameCache, FusedStack, PackedStack, fold_norm
from deployments.talker.sampling.torch_sampler import Draw
from deployments.talker.sampling.triton_sampler import Embeddings, FrameOutputs, begin_frame, sample_code
from deployments.talker.state.batch_state import BatchOptions


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
    """From the talker's hidden state and codebook 0 to the frame and the sum of its embeddings. Not reentrant."""

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
        self._project(hidden, both)
        begin_frame(code0, self.tables[0], both, outputs)
        done = self.stack.frame_start(both, self.cache)
        return Activations(done.values[num_rows:], done.squares[:, num_rows:], done.parts)

    def _project(self, hidden: Tensor, out: Activations) -> None:
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
