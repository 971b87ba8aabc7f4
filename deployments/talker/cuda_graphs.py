"""The code predictor as CUDA graphs, one for each batch size: 15 codebooks are thousands of launches otherwise."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.talker.model.talker import Talker
from deployments.talker.sampling import BatchFilter, Draw, FilterOptions, NoiseSource

_ANY = FilterOptions(do_sample=True, temperature=1.0, top_k=50, top_p=1.0)
_WARM_UP_RUNS = 3


@dataclass(frozen=True, slots=True)
class PredictorInputs:
    """What one predictor call of a batch depends on."""

    hidden: Tensor  # [rows, talker hidden], after the final norm
    code0: Tensor  # [rows] int64
    frames: Tensor  # [rows] int64: frame numbers
    seeds: Tensor  # [rows] int64
    options: BatchFilter


def predict(talker: Talker, inputs: PredictorInputs, noise: NoiseSource) -> tuple[Tensor, Tensor]:
    """Frames [rows, groups] and the sums of their embeddings [rows, talker hidden]."""

    def sample(logits: Tensor, codebook: int) -> Tensor:
        return inputs.options.sample(logits, Draw(inputs.seeds, inputs.frames, codebook), noise)

    embed0 = talker.model.codec_embedding(inputs.code0)
    codes, embeds = talker.code_predictor(inputs.hidden, inputs.code0, embed0, sample=sample)
    return codes, embeds


class PredictorGraphs:
    """Captured predictor calls by number of rows. What they cannot do is left to the plain call, and counted."""

    def __init__(self, talker: Talker, noise: NoiseSource) -> None:
        self._talker, self._noise = talker, noise
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, PredictorInputs, tuple[Tensor, Tensor]]] = {}
        self.num_eager = 0

    @torch.inference_mode()
    def capture(self, rows: int) -> None:
        """Record a call with this many rows."""
        weight = self._talker.codec_head.weight
        hidden = torch.zeros((rows, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        numbers = torch.zeros(rows, dtype=torch.long, device=weight.device)
        options = BatchFilter([_ANY] * rows, device=weight.device)
        options.any_top_p = True  # the graph holds the filter whether or not a row uses it
        inputs = PredictorInputs(hidden, numbers, numbers.clone(), numbers.clone(), options)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                predict(self._talker, inputs, self._noise)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = predict(self._talker, inputs, self._noise)
        self._captured[rows] = graph, inputs, outputs

    def __call__(self, inputs: PredictorInputs) -> tuple[Tensor, Tensor]:
        """As `predict`; the result is valid until the next call."""
        captured = self._captured.get(len(inputs.code0))
        if captured is None or not captured[1].options.covers(inputs.options):
            self.num_eager += 1
            return predict(self._talker, inputs, self._noise)
        graph, static, outputs = captured
        static.hidden.copy_(inputs.hidden)
        static.code0.copy_(inputs.code0)
        static.frames.copy_(inputs.frames)
        static.seeds.copy_(inputs.seeds)
        static.options.copy_(inputs.options)
        graph.replay()
        return outputs
