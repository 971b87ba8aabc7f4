"""Compare two implementations' codes, which may differ only where scores are nearly tied.

The summation order in float32 decides between two logits that differ by 1e-5. Rounding in bfloat16 decides between
logits that differ by 1e-2. Codes are therefore compared one by one. If a code differs, its margin shows whether the
scores were nearly tied, and generation continues from the expected code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.codec.encoder import Codebook, CodecEncoder
from deployments.protocol import Codes, Frame, Progress, SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.networks.unfused_networks import UnfusedNetworks
from deployments.talker.sampling import torch_sampler
from deployments.talker.sampling.torch_sampler import NoiseKey
from deployments.talker.state.batch_state import BatchOptions


@dataclass(frozen=True, slots=True)
class Choice:
    """Scores from which one code was selected."""

    logits: Tensor  # [vocab], divided by the temperature
    noise: Tensor  # [vocab], 1 for greedy choices; infinite for codes that were filtered out
    borders: tuple[tuple[float, float], ...]  # for top-k, then top-p: last kept and first dropped logit
    to_nucleus: Tensor  # [vocab], distance in probability to the top-p cutoff

    @classmethod
    def by(cls, options: BatchOptions, logits: Tensor, noise: Tensor) -> "Choice":
        """Build the choice from one row's logits [vocab], noise [vocab] and sampling `options`."""
        nowhere = torch.full_like(logits, torch.inf)
        if not options.ints("do_sample")[0]:
            return cls(logits, torch.ones_like(logits), (), nowhere)
        scaled, top_p = logits / options.floats("temperature")[0], float(options.floats("top_p")[0])
        values, order = scaled.sort(descending=True)
        num_kept = [min(int(options.ints("top_k")[0]) or len(values), len(values))]
        if top_p < 1:
            order = order[: int((values >= values[num_kept[0] - 1]).sum())]  # including ties with the last kept value
            tail = scaled[order].softmax(-1).flip(-1).cumsum(-1).flip(-1)
            nowhere.scatter_(0, order, (tail - (1 - top_p)).abs())
            num_kept.append(max(1, int((tail > 1 - top_p).sum())))
        borders = [(float(values[num - 1]), float(values[num])) for num in num_kept if num < len(values)]
        return cls(scaled, noise, tuple(borders), nowhere)

    def margin(self, ours: int, theirs: int) -> float:
        """Return the smallest change to a score, or to a filter's cutoff, that would select the other code."""
        scores = self.logits - self.noise.log()
        by_score = float(scores[ours] - scores[theirs])
        at_filter = min(map(self._at_filter, (ours, theirs)))
        return at_filter if by_score < 0 else min(by_score, at_filter)

    def _at_filter(self, code: int) -> float:
        logit = float(self.logits[code])
        across = [logit - dropped if logit >= kept else kept - logit for kept, dropped in self.borders]
        return min([*across, float(self.to_nucleus[code])])

    @property
    def spread(self) -> float:
        """Standard deviation of the unsuppressed logits."""
        return float(self.logits[self.logits.isfinite()].std())


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Permitted differences of codes: margins in logit deviations, and a share of frames (at least one)."""

    margin: float
    share: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """First code that differs from the expected one. The rest of its frame is not compared."""

    frame: int
    codebook: int
    margin: float  # as returned by `Choice.margin`
    spread: float = 1.0  # as in `Choice.spread`

    def __str__(self) -> str:
        return f"frame {self.frame}, codebook {self.codebook}, with a margin of {self.margin:.1e}"


def near_ties(found: list[Divergence], expected: Codes, tolerance: Tolerance) -> tuple[bool, str]:
    """Return whether codes [frames, groups] differ only at near-ties, with a description of the first difference."""
    detail = f"{len(expected)} frames, {len(found)} of them differ"
    if not found:
        return True, detail
    widest = max(each.margin / each.spread for each in found)
    detail += f", first in {found[0]}; the largest margin is {widest:.1e} standard deviations of the logits"
    detail += f" (limit: {tolerance.margin:.0e}, in {tolerance.share:.0%} of the frames)"
    near = all(0 <= each.margin <= tolerance.margin * each.spread for each in found)
    return near and len(found) <= max(1.0, tolerance.share * len(expected)), detail


@contextmanager
def kept() -> Iterator[list[Choice]]:
    """Within this context, record every choice made by a CPU engine that runs a single request."""
    made = list[Choice]()

    def choose(networks: UnfusedNetworks, logits: Tensor, options: BatchOptions, noise_key: NoiseKey) -> Tensor:
        everywhere = torch.full_like(logits, torch.inf)

        def keep(noise_key: NoiseKey, codes: Tensor) -> Tensor:
            values = networks.noise(noise_key, codes)
            everywhere.scatter_(-1, codes, values)
            return values

        chosen = torch_sampler.sample(logits, options, noise_key, keep)
        made.append(Choice.by(options, logits[0], everywhere[0]))
        return chosen

    with patch.object(UnfusedNetworks, "choose", choose), patch.object(torch_sampler, "IN_C", False):  # else one C call
        yield made


def divergences(
    engine: Engine,
    request: SynthesisRequest,
    expected: Codes,
    *,
    most: int,
    begin: Callable[[int], None] = lambda known: None,
) -> list[Divergence]:
    """Return where a CPU engine's codes differ from the `expected` codes [frames, groups] of a request.

    After each difference, generation continues from the expected codes. `most` is the request's maximum number of
    frames. `begin` is called with the number of known frames each time before generation continues.
    """
    found: list[Divergence] = []
    known, eos = 0, engine.model_config.codes.eos
    while known < min(most, len(expected) + 1):
        begin(known)
        resume = Progress(expected[:known], 0) if known else None
        with kept() as choices:
            rest = replace(request, resume=resume)
            codes = run(engine, rest, expected[known:])
        divergence = _first(codes, expected[known:], choices, eos=eos, full=known + len(codes) == most)
        if divergence is None:
            break
        found.append(replace(divergence, frame=known + divergence.frame))
        known += divergence.frame + 1
    return found


def run(engine: Engine, request: SynthesisRequest, until: Codes | None = None) -> Codes:
    """Return one request's frames, [frames, groups], up to the end or the first difference from `until`."""
    engine.add(0, request)
    frames: list[Frame] = []
    while not engine.is_idle:
        for _, chunk in engine.step().chunks:
            frames += list(chunk.codes)
        common = frames if until is None else frames[: len(until)]
        if until is not None and (len(common) < len(frames) or not np.array_equal(common, until[: len(common)])):
            engine.abort(0)
    return np.stack(frames) if frames else np.zeros((0, engine.model_config.num_code_groups), np.int16)


def _first(codes: Codes, expected: Codes, choices: list[Choice], *, eos: int, full: bool) -> Divergence | None:
    """Return the first difference. `full` means that the codes end because the frame limit was reached."""
    common, groups = min(len(codes), len(expected)), expected.shape[1]
    differing = np.argwhere(codes[:common] != expected[:common])
    if len(differing):
        frame, codebook = (int(index) for index in differing[0])
        ours, theirs = int(codes[frame, codebook]), int(expected[frame, codebook])
    elif len(codes) == len(expected) and (full or len(choices) > common * groups):
        return None
    else:
        frame, codebook = common, 0
        ours = int(codes[common, 0]) if common < len(codes) else eos
        theirs = int(expected[common, 0]) if common < len(expected) else eos
    choice = choices[frame * groups + codebook]
    return Divergence(frame, codebook, choice.margin(ours, theirs), choice.spread)


def nearest_divergences(encoder: CodecEncoder, audio: NDArray[np.float32], expected: Codes) -> list[Divergence]:
    """Return where the codes of a recording [samples] differ from the expected codes [frames, groups].

    After each difference, encoding continues with the residual of the expected code. Margins are differences between
    distances.
    """
    found: list[Divergence] = []
    columns = enumerate(torch.from_numpy(expected.T.astype(np.int64)))

    def nearest(codebook: Codebook, x: Tensor) -> tuple[Tensor, Tensor]:
        number, theirs = next(columns)
        table = codebook.entries
        distances = torch.cdist(x[None], table[None])[0]
        ours = distances.argmin(dim=-1)
        indices = torch.cat([theirs, ours[len(theirs) :]])
        for frame in (ours != indices).nonzero()[:, 0].tolist():
            margin = float(distances[frame, indices[frame]] - distances[frame, ours[frame]])
            found.append(Divergence(frame, number, margin, float(distances[frame].std())))
        return indices, table[indices]

    with patch.object(Codebook, "nearest", nearest):
        encoder.encode(audio)
    return found
