"""Training data of the talker: each utterance's codes and token ids, arranged in rows as in real prompts.

This is a batched form of the layout of `PromptBuilder`. A row is a text id plus either an id of the talker's codec
vocabulary or a complete frame.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deployments.talker.model.model_config import ModelConfig
from deployments.talker.text.tokenizer import TextTokenizer
from tools.demo_voice.manners import PLAIN
from tools.demo_voice.shape import PHONES_PER_FRAME
from tools.demo_voice.tokenizer import cased

NONE = -1  # marks a missing codec id, frame or target in all arrays below
END = -2  # target that marks the end of speech
_LENGTH_STEP = 32  # batches are padded to multiples of this
_LEAD = 2  # frames of silence that are left out if all text is known before the first frame
_TOLD_SHARE = 0.2  # share of plain speech that gets instructions that the voice cannot follow
_BREAK_RATE = 0.04  # share of the places inside words at which a text is cut, if it is broken up

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CorpusUtterance:
    """One line of the run's index, and the location of its frames."""

    text: str
    voice: str
    split: str
    start: int  # index of its first frame in the corpus
    frames: int
    manner: str = PLAIN

    def asked(
        self, tokens: list[int], language: str | None, *, full_text: bool, turn: Sequence[int] = ()
    ) -> "TrainingSample":
        """Leading frames to skip. Speech begins immediately if all text is known; streamed text must arrive first."""
        lead = _LEAD if full_text and self.frames > _LEAD else 0
        spoken = replace(self, start=self.start + lead, frames=self.frames - lead)
        return TrainingSample(spoken, tokens, language, full_text, turn)


@dataclass(frozen=True, slots=True)
class Corpus:
    """All frames, and the utterances to which they belong."""

    codes: NDArray[np.int16]  # [frames, groups]; the first groups are the teacher's sounds
    utterances: list[CorpusUtterance]

    def spoken(self) -> NDArray[np.float32]:
        """Return [frames]: the share of the utterance's sounds before each frame, not counting silence."""
        before = np.concatenate(([0], np.cumsum((self.codes[:, :PHONES_PER_FRAME] != 0).sum(1))))
        share = np.zeros(len(self.codes), np.float32)
        for utterance in self.utterances:
            begin, end = utterance.start, utterance.start + utterance.frames
            share[begin:end] = (before[begin:end] - before[begin]) / max(1, before[end] - before[begin])
        return share

    @classmethod
    def load(cls, run: Path) -> "Corpus":
        """Read the results of the earlier steps from the run folder."""
        counts = json.loads((run / "frames.json").read_text(encoding="utf-8"))
        with (run / "index.jsonl").open(encoding="utf-8") as lines:
            entries = [json.loads(line) for line in lines]
        ends = np.cumsum(counts)
        codes = np.fromfile(run / "codes.i16", dtype=np.int16).reshape(int(ends[-1]), -1)
        utterances = [
            CorpusUtterance(entry["text"], entry["voice"], entry["split"], int(end - count), count, entry["manner"])
            for entry, count, end in zip(entries, counts, ends, strict=True)
        ]
        return cls(codes, utterances)

    def part(self, split: str) -> list[CorpusUtterance]:
        """Return the utterances of the split "train" or "heldout", except those without frames."""
        return [utterance for utterance in self.utterances if utterance.split == split and utterance.frames > 0]


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """An utterance as requested: its tokens, the language tag, the text mode, and the turn with instructions."""

    utterance: CorpusUtterance
    tokens: list[int]
    language: str | None
    full_text: bool
    turn: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Samples as padded rows, and the target that each row has to predict."""

    text: Ints  # [samples, length]: text ids
    codec: Ints  # [samples, length]: ids of the talker's codec vocabulary
    frames: Ints  # [samples, length]: index in the corpus of the row's frame
    targets: Ints  # [samples, length]: the frame that the row predicts, or END
    text_first: Ints  # [samples]: first row with text, if all text comes before the frames
    text_count: Ints  # [samples]: number of such rows; 0 if text and frames share rows


def padded(length: int) -> int:
    """Return the rows per sequence of a batch. There are few sizes, because each batch shape is captured separately."""
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP


class RowLayout:
    """Arranges samples in rows, with the ids of one checkpoint."""

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer) -> None:
        self.config, self.role = config, tokenizer.role

    def length(self, sample: TrainingSample) -> int:
        """Return the number of rows of a sample: its prompt and its frames."""
        return len(self._head(sample)) + self._lead(sample) + 1 + sample.utterance.frames

    def batch(self, samples: Sequence[TrainingSample], *, max_rows: int = 0) -> TrainingBatch:
        """Pad samples of similar length to one batch, and the batch to the number of samples that fit `max_rows`."""
        length = padded(max(self.length(sample) for sample in samples))
        shape = (max(len(samples), max_rows // length), length)
        text = np.full(shape, self.config.tokens.tts_pad)
        codec, frames, targets = np.full(shape, NONE), np.full(shape, NONE), np.full(shape, NONE)
        text_first, text_count = np.zeros(shape[0], np.int64), np.zeros(shape[0], np.int64)
        for number, sample in enumerate(samples):
            first = self._fill(sample, text=text[number], codec=codec[number], frames=frames[number])
            count = sample.utterance.frames
            targets[number, first : first + count] = sample.utterance.start + np.arange(count)
            targets[number, first + count] = END
            text_first[number] = first - self._lead(sample)
            text_count[number] = len(sample.tokens) if sample.full_text else 0
        return TrainingBatch(text, codec, frames, targets, text_first, text_count)

    def _fill(self, sample: TrainingSample, *, text: Ints, codec: Ints, frames: Ints) -> int:
        """Write a sample's rows, and return the row that predicts its first frame."""
        tokens, codes = self.config.tokens, self.config.codes
        tags = self._head(sample)
        head, lead, count = len(tags), self._lead(sample), sample.utterance.frames
        text[: len(sample.turn) + len(self.role)] = [*sample.turn, *self.role]
        text[head - 1] = tokens.tts_bos
        trailing = [*sample.tokens, tokens.tts_eos][: len(text) - head]  # speech may end before all text is read
        text[head : head + len(trailing)] = trailing
        codec[:head] = tags
        codec[head : head + lead] = codes.pad
        codec[head + lead] = codes.bos
        first = head + lead
        frames[first + 1 : first + 1 + count] = sample.utterance.start + np.arange(count)
        return first

    def _head(self, sample: TrainingSample) -> list[int]:
        """Return codec ids of rows before the text: none for instructions and role, then language, speaker, padding."""
        codes = self.config.codes
        if sample.language is None:
            tags = [codes.nothink, codes.think_bos, codes.think_eos]
        else:
            tags = [codes.think, codes.think_bos, self.config.languages[sample.language], codes.think_eos]
        tags += [self.config.speakers[sample.utterance.voice], codes.pad]
        return [NONE] * (len(sample.turn) + len(self.role)) + tags

    def _lead(self, sample: TrainingSample) -> int:
        """Return the number of text rows that must precede the first frame."""
        return len(sample.tokens) + 1 if sample.full_text else 0


class Sampler:
    """Source of endless batches of the training utterances, in different writings and modes each time."""

    def __init__(
        self,
        utterances: list[CorpusUtterance],
        layout: RowLayout,
        *,
        tokens: list[list[list[int]]],
        turns: dict[str, list[list[int]]],
        full_text: float,
    ) -> None:
        """`tokens` holds the writings of each utterance's text, and `turns` the instructions that request each manner.
        `full_text` is the share of utterances in that mode.
        """
        self.utterances, self.layout, self.full_text = utterances, layout, full_text
        self.tokens, self.turns = tokens, turns

    def batches(self, max_rows: int, *, draw: np.random.Generator) -> Iterator[TrainingBatch]:
        """Yield batches of at most `max_rows` padded rows, epoch after epoch."""
        while True:
            groups = self._epoch(max_rows, draw)
            for number in draw.permutation(len(groups)):
                yield self.layout.batch(groups[number], max_rows=max_rows)

    def _epoch(self, max_rows: int, draw: np.random.Generator) -> list[list[TrainingSample]]:
        """Return every utterance once, grouped by length. The order within about a length is random."""
        samples = [self._sample(number, draw) for number in range(len(self.utterances))]
        lengths = np.array([self.layout.length(sample) for sample in samples])
        order = np.argsort(lengths * draw.uniform(0.95, 1.05, len(samples)))
        groups: list[list[TrainingSample]] = [[]]
        longest = 0
        for number in order:
            longest = max(longest, padded(lengths[number]))
            if groups[-1] and longest * (len(groups[-1]) + 1) > max_rows:
                groups.append([])
                longest = padded(lengths[number])
            groups[-1].append(samples[number])
        return groups

    def _sample(self, number: int, draw: np.random.Generator) -> TrainingSample:
        utterance, ways = self.utterances[number], self.tokens[number]
        turns = self.turns[utterance.manner]
        language = "english" if draw.random() < 0.5 else None
        tokens, full_text = ways[draw.integers(len(ways))], bool(draw.random() < self.full_text)
        is_told = utterance.manner != PLAIN or draw.random() < _TOLD_SHARE
        turn = turns[draw.integers(len(turns))] if is_told else ()
        return utterance.asked(tokens, language, full_text=full_text, turn=turn)


def written_ways(texts: Sequence[str], tokenizer: TextTokenizer, *, ways: int, seed: int) -> list[list[list[int]]]:
    """Return token ids of each text in `ways` writings, with different cases. Every second one is cut inside words.

    Cutting words at random places (as BPE dropout does) teaches the talker to speak words that are not in the texts.
    """
    draw = random.Random(seed)
    written = []
    for text in texts:
        variants = list(cased([text] * ways, draw))
        written.append(
            [
                tokenizer.encode(variant) if number % 2 == 0 else _broken_up(variant, tokenizer, draw)
                for number, variant in enumerate(variants)
            ]
        )
    return written


def _broken_up(text: str, tokenizer: TextTokenizer, draw: random.Random) -> list[int]:
    text = text.lstrip()
    cuts = [place for place in range(1, len(text)) if draw.random() < _BREAK_RATE]
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [token for part in parts for token in tokenizer.encode_exact(part)]
