"""Find the talker attention head that follows the text during speech, and score how steadily it does so.

Each head is judged on known texts and on the codes generated from them. The talker processes a complete utterance in
one pass and records, for each frame, how much each head attends to the text and at which position. A head that follows
the text puts most of its attention on the text, and moves from the first word to the last without large jumps.
"""

import json
from collections.abc import Sequence as Sized
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from deployments.protocol import Codes, Progress, SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.model.input_tables import MAX_PASS_POSITIONS
from deployments.talker.runner.prefill import PrefillInputs, SequencePart
from deployments.talker.state.sequence import ATTENTIVE
from deployments.weights.description import OWN_FACTS

# Between two frames, a head that follows the text moves by at most this many tokens backward or forward.
_BACK, _ON = 1.5, 4.0
_LEAST_SCORE = 0.7  # the embedded voice's head scores 0.99; heads of random weights score at most 0.52


@dataclass(frozen=True, slots=True)
class HeadScore:
    """Scores of one attention head, each from 0 to 1 and averaged over the texts."""

    layer: int
    head: int
    reading: float  # share of frames (at most as many as the text has tokens) in which the head attends to the text
    steady: float  # share of steps between frames that are not jumps
    coverage: float  # share of the text between the first and the last attended position

    @property
    def score(self) -> float:
        """Overall score of the head, which combines the three values."""
        return self.reading * self.steady * self.coverage

    @property
    def follows(self) -> bool:
        """Whether the head is accurate enough to derive word timestamps."""
        return self.score >= _LEAST_SCORE

    def __str__(self) -> str:
        steps = f"{self.steady:.0%} without leaps"
        parts = f"reads in {self.reading:.0%} of the frames, {steps}, {self.coverage:.0%} of the text"
        return f"layer {self.layer}, head {self.head}, {self.score:.2f} of 1: {parts}"


class _Watched:
    """Implementation of `Attend` for one complete utterance, which records where each head attends to the text."""

    def __init__(self, text_start: int, num_tokens: int, first_frame: int) -> None:
        """Set the positions of the text's first token and of the first frame."""
        self._text, self._first = slice(text_start, text_start + num_tokens), first_frame
        self.mass: list[Tensor] = []  # per layer: attention to the text [heads, frames]
        self.place: list[Tensor] = []  # per layer: mean attended position, in tokens

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        queries = query.transpose(0, 1)
        keys, values = (each.transpose(0, 1).repeat_interleave(repeats, 0) for each in (key, value))
        scores = (queries @ keys.transpose(1, 2)).float() * query.shape[2] ** -0.5
        rows = torch.arange(len(query))
        weights = scores.masked_fill(rows > rows[:, None], -torch.inf).softmax(-1)
        own = weights[:, self._first :, self._text]
        mass = own.sum(-1)
        self.mass.append(mass)
        self.place.append((own * torch.arange(own.shape[2])).sum(-1) / mass.clamp_min(1e-9))
        out: Tensor = weights.to(values.dtype) @ values
        return out.transpose(0, 1)


@torch.inference_mode()
def find_head(engine: Engine, spoken: Sized[tuple[SynthesisRequest, Codes]]) -> list[HeadScore]:
    """Score all heads on requests and the codes [frames, groups] generated from them, best head first.

    `engine` must run on a CPU. Utterances too long for one forward pass are truncated.
    """
    scores = torch.stack([_scores(engine, request, codes) for request, codes in spoken]).mean(0)  # [layers, heads, 3]
    layers, heads, _ = scores.shape
    found = [HeadScore(layer, head, *scores[layer, head].tolist()) for layer in range(layers) for head in range(heads)]
    return sorted(found, key=lambda each: each.score, reverse=True)


def write_head(directory: Path, head: HeadScore) -> Path:
    """Store the head next to the checkpoint, where the talker looks for it, and return the file. Raises `OSError`."""
    file = directory / OWN_FACTS
    facts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps({**facts, "alignment_head": [head.layer, head.head]}) + "\n", encoding="utf-8")
    return file


def _scores(engine: Engine, request: SynthesisRequest, codes: Codes) -> Tensor:
    """Return the three `HeadScore` values for one utterance, [layers, heads, 3]."""
    networks = engine.runner.networks
    resumed = replace(request, resume=Progress(codes, 0))
    sequence = engine.input_processor.build_sequence(0, resumed)
    assert sequence is not None, "the text is whole"
    prompt, size = sequence.prompt, min(sequence.num_positions, MAX_PASS_POSITIONS)
    sequence.row = 0
    inputs = PrefillInputs(MAX_PASS_POSITIONS, scratch_row=1, tables=networks.tables)
    inputs.fill([SequencePart(sequence, 0, size, is_last=True)])
    tensors = inputs.tensors
    rows = networks.tables.rows(tensors.text_ids[:size], tensors.codec_ids[:size])
    watched = _Watched(prompt.text_start, prompt.num_text_tokens, prompt.num_positions)
    networks.talker(rows, tensors.positions[:size], watched)
    mass, place = torch.stack(watched.mass), torch.stack(watched.place)  # [layers, heads, frames]
    reads = mass > ATTENTIVE
    steps = place.diff(dim=-1)
    both = reads[..., 1:] & reads[..., :-1]
    steady = ((steps >= -_BACK) & (steps <= _ON) & both).sum(-1) / both.sum(-1).clamp_min(1)
    low = torch.where(reads, place, torch.inf).amin(-1)
    high = torch.where(reads, place, -torch.inf).amax(-1)
    coverage = ((high - low + 1) / prompt.num_text_tokens).clamp(0, 1)
    most = min(mass.shape[-1], prompt.num_text_tokens)
    return torch.stack(((reads.sum(-1) / most).clamp(max=1), steady, coverage), -1)
