"""What the talker is trained on: each utterance's codes and token ids, laid out in the rows of real prompts.

The layout is that of `PromptBuilder`, of which this is the batched form: a row is a text id plus either an
id of the talker's codec vocabulary or a whole frame.
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

NONE = -1  # no codec id, no frame, or no target: every array below uses it
END = -2  # as a target: the end of speech
_LENGTH_STEP = 32  # batches are padded to multiples of this
_LEAD = 2  # frames of silence that are left out where all text is known before the first frame
_TOLD_SHARE = 0.2  # of what is spoken plainly has instructions that the voice cannot follow
_BREAK_RATE = 0.04  # of the places inside words at which a broken-up text is cut

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CorpusUtterance:
    """One line of the run's index and where its frames stand."""

    text: str
    voice: str
    split: str
    start: int  # first of its frames in the corpus
    frames: int
    manner: str = PLAIN

    def asked(
        self, tokens: list[int], language: str | None, *, full_text: bool, turn: Sequence[int] = ()
    ) -> "TrainingSample":
        """Speech that knows all its text begins at once; streamed text has to come before it can be spoken."""
        lead = _LEAD if full_text and self.frames > _LEAD else 0
        spoken = replace(self, start=self.start + lead, frames=self.frames - lead)
        return TrainingSample(spoken, tokens, language, full_text, turn)


@dataclass(frozen=True, slots=True)
class Corpus:
    """All frames, and the utterances they belong to."""

    codes: NDArray[np.int16]  # [frames, groups]; the first groups are the teacher's sounds
    utterances: list[CorpusUtterance]

    def spoken(self) -> NDArray[np.float32]:
        """[frames]: the share of its utterance's sounds that comes before each frame; silence does not count."""
        before = np.concatenate(([0], np.cumsum((self.codes[:, :PHONES_PER_FRAME] != 0).sum(1))))
        share = np.zeros(len(self.codes), np.float32)
        for utterance in self.utterances:
            begin, end = utterance.start, utterance.start + utterance.frames
            share[begin:end] = (before[begin:end] - before[begin]) / max(1, before[end] - before[begin])
        return share

    @classmethod
    def load(cls, run: Path) -> "Corpus":
        """Read what the earlier steps left in the run folder."""
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
        """The utterances of "train" or of "heldout"; those without a frame are left out."""
        return [utterance for utterance in self.utterances if utterance.split == split and utterance.frames > 0]


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """An utterance as it is asked for: its tokens, the language tag, the text mode and the turn of instructions."""

    utterance: CorpusUtterance
    tokens: list[int]
    language: str | None
    full_text: bool
    turn: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Samples as padded rows, and what each row has to predict."""

    text: Ints  # [samples, length]: text ids
    codec: Ints  # [samples, length]: ids of the talker's codec vocabulary
    frames: Ints  # [samples, length]: the row's frame as its number in the corpus
    targets: Ints  # [samples, length]: the frame that the row predicts, or END
    text_first: Ints  # [samples]: first of the rows with the text, where all of it comes before the frames
    text_count: Ints  # [samples]: tokens there; 0 where the text comes beside the frames


def padded(length: int) -> int:
    """Rows of a sequence in a batch: few different numbers, because each shape of batch is recorded by itself."""
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP


class RowLayout:
    """Lays samples out for one checkpoint's ids."""

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer) -> None:
        self.config, self.role = config, tokenizer.role

    def length(self, sample: TrainingSample) -> int:
        """Rows of a sample: its prompt and its frames."""
        return len(self._head(sample)) + self._lead(sample) + 1 + sample.utterance.frames

    def batch(self, samples: Sequence[TrainingSample], *, max_rows: int = 0) -> TrainingBatch:
        """Pad samples of similar length to one batch, and the batch to as many samples as `max_rows` hold."""
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
        """Write a sample's rows; returns the row that predicts its first frame."""
        tokens, codes = self.config.tokens, self.config.codes
        tags = self._head(sample)
        head, lead, count = len(tags), self._lead(sample), sample.utterance.frames
        text[: len(sample.turn) + len(self.role)] = [*sample.turn, *self.role]
        text[head - 1] = tokens.tts_bos
        trailing = [*sample.tokens, tokens.tts_eos][: len(text) - head]  # speech may end before all its text has come
        text[head : head + len(trailing)] = trailing
        codec[:head] = tags
        codec[head : head + lead] = codes.pad
        codec[head + lead] = codes.bos
        first = head + lead
        frames[first + 1 : first + 1 + count] = sample.utterance.start + np.arange(count)
        return first

    def _head(self, sample: TrainingSample) -> list[int]:
        """Codec ids of the rows before the text: none for instructions and role, then language, speaker, padding."""
        codes = self.config.codes
        if sample.language is None:
            tags = [codes.nothink, codes.think_bos, codes.think_eos]
        else:
            tags = [codes.think, codes.think_bos, self.config.languages[sample.language], codes.think_eos]
        tags += [self.config.speakers[sample.utterance.voice], codes.pad]
        return [NONE] * (len(sample.turn) + len(self.role)) + tags

    def _lead(self, sample: TrainingSample) -> int:
        """Rows of text before the first frame may start."""
        return len(sample.tokens) + 1 if sample.full_text else 0


class Sampler:
    """Endless batches of the training utterances, in other words and modes each time."""

    def __init__(
        self,
        utterances: list[CorpusUtterance],
        layout: RowLayout,
        *,
        tokens: list[list[list[int]]],
        turns: dict[str, list[list[int]]],
        full_text: float,
    ) -> None:
        """`tokens`: of each utterance, the ways its text may be written. `turns`: of each manner, what may ask for it.
        `full_text`: share of that mode.
        """
        self.utterances, self.layout, self.full_text = utterances, layout, full_text
        self.tokens, self.turns = tokens, turns

    def batches(self, max_rows: int, *, draw: np.random.Generator) -> Iterator[TrainingBatch]:
        """Batches of at most `max_rows` padded rows, epoch after epoch."""
        while True:
            groups = self._epoch(max_rows, draw)
            for number in draw.permutation(len(groups)):
                yield self.layout.batch(groups[number], max_rows=max_rows)

    def _epoch(self, max_rows: int, draw: np.random.Generator) -> list[list[TrainingSample]]:
        """Every utterance once, grouped by length; the order within about a length is random."""
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
    """Token ids of each text in `ways` writings: in any case, and every second one broken up inside its words.

    Words that are cut at random places (as BPE dropout does) teach how to speak words that the texts do not hold.
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
