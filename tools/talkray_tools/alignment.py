"""Find the attention head of a talker that follows the text while it speaks, and how steadily it does.

A head is judged on known texts and the codes generated from them. A whole utterance runs through the talker at once,
and each head's attention to the text is recorded for each frame: its amount and its place. A head that follows the text
has most of its attention there, and moves from its beginning to its end without leaps.
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

# A head that follows speech moves by at most this many tokens from one frame to the next.
_BACK, _ON = 1.5, 4.0
_LEAST_SCORE = 0.7  # the embedded voice's has 0.99, heads of random weights at most 0.52


@dataclass(frozen=True, slots=True)
class HeadScore:
    """How well a head follows texts; each value is from 0 to 1, averaged over the texts."""

    layer: int
    head: int
    reading: float  # share of frames (at most as many as the text has tokens) in which it reads the text
    steady: float  # share of its steps that are no leaps
    coverage: float  # share of the text between the first and last place it reads

    @property
    def score(self) -> float:
        """The three values combined."""
        return self.reading * self.steady * self.coverage

    @property
    def follows(self) -> bool:
        """Whether the head is good enough to derive the times of words."""
        return self.score >= _LEAST_SCORE

    def __str__(self) -> str:
        steps = f"{self.steady:.0%} without leaps"
        parts = f"reads in {self.reading:.0%} of the frames, {steps}, {self.coverage:.0%} of the text"
        return f"layer {self.layer}, head {self.head}, {self.score:.2f} of 1: {parts}"


class _Watched:
    """The `Attend` of one whole utterance, which records where each head reads the text."""

    def __init__(self, text_start: int, num_tokens: int, first_frame: int) -> None:
        """Positions of the first token of the text, and of the first frame."""
        self._text, self._first = slice(text_start, text_start + num_tokens), first_frame
        self.mass: list[Tensor] = []  # of each layer: attention on the text [heads, frames]
        self.place: list[Tensor] = []  # and its mean place, in tokens

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
    """Score all heads, best first, on requests and the codes [frames, groups] generated from them.

    `engine` is on a CPU. Of long utterances, only the part that fits one pass counts.
    """
    scores = torch.stack([_scores(engine, request, codes) for request, codes in spoken]).mean(0)  # [layers, heads, 3]
    layers, heads, _ = scores.shape
    found = [HeadScore(layer, head, *scores[layer, head].tolist()) for layer in range(layers) for head in range(heads)]
    return sorted(found, key=lambda each: each.score, reverse=True)


def write_head(directory: Path, head: HeadScore) -> Path:
    """Store the head next to the checkpoint, where the talker looks for it. Returns the file. Raises OSError."""
    file = directory / OWN_FACTS
    facts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps({**facts, "alignment_head": [head.layer, head.head]}) + "\n", encoding="utf-8")
    return file


def _scores(engine: Engine, request: SynthesisRequest, codes: Codes) -> Tensor:
    """[layers, heads, 3]: the values of HeadScore, of one utterance."""
    networks = engine.runner.networks
    resumed = replace(request, resume=Progress(codes, 0))
    sequence = engine.intake.prepare(0, resumed)
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
