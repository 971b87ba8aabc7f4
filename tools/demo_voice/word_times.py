"""Compare word times of the embedded voice with the teacher's phonemes, which its first codebooks contain.

    python -m tools.demo_voice.word_times --sentences 25 --teacher-wheel DIR

The engine in this process speaks held-out sentences, with all text in the prompt and with streamed text. The beginnings
of words are compared, except for the first word, which begins with the audio. DIR contains the hibari-tts wheel.
"""

import argparse
import logging
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deployments.config import TalkerConfig
from deployments.protocol import PcmChunk, SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from deployments.weights.store import locate
from serve_app.extensions.text.spoken_text import TextRules, read
from serve_app.extensions.word_times.word_times import WordTimes
from tools.demo_voice.shape import PHONES_PER_FRAME
from tools.demo_voice.teacher import AHEAD, Teacher
from tools.demo_voice.texts import lines

logger = logging.getLogger(__name__)

_SPACE = 16  # the teacher's number for a gap between words; smaller numbers are silence and punctuation
_LEAST_ALIKE = 0.8  # minimum similarity, up to 1; below it, the voice said something else

Phones = NDArray[np.int64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=25)
    parser.add_argument("--teacher-wheel", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    teacher = Teacher.load(options.teacher_wheel)
    engine = build_engine(locate("embedded"), TalkerConfig(device="cpu", max_num_seqs=1))
    for full_text in (False, True):
        errors = np.array(list(_errors(engine, teacher, sentences=options.sentences, full_text=full_text)))
        far_ms = 1000 * np.abs(errors)
        logger.info(
            "%s: beginnings of %d words: error median %.0f ms, 90th percentile %.0f ms, worst %.0f ms, bias %+.0f ms",
            "all text in the prompt" if full_text else "streamed text",
            len(errors),
            np.median(far_ms),
            np.quantile(far_ms, 0.9),
            far_ms.max(),
            1000 * np.median(errors),
        )


def _errors(engine: Engine, teacher: Teacher, *, sentences: int, full_text: bool) -> Iterator[float]:
    """Return the delay in seconds of each word time, for words on which the teacher and the text agree."""
    voices = engine.info.voices
    for number, line in enumerate(lines(0, ("",))[:sentences]):
        voice = voices[number % len(voices)]
        request = SynthesisRequest(
            "w", line.text, voice=voice, seed=number, non_streaming_mode=full_text, word_times=True
        )
        frames, told = _speak(engine, request)
        truth = _beginnings(frames[:, :PHONES_PER_FRAME].reshape(-1).astype(np.int64), teacher.words(line.text))
        logger.info("%d of %d: %d frames, %s", number + 1, sentences, len(frames), line.text)
        if truth is None or len(truth) != len(told):
            logger.info("left out: the voice said something else, or the teacher counts words differently")
            continue
        phone_s = engine.info.frame_samples / engine.info.sample_rate / PHONES_PER_FRAME
        for began, told_s in list(zip(truth, told, strict=True))[1:]:
            if began is not None:
                yield told_s - (began * phone_s + AHEAD / engine.info.sample_rate)


def _speak(engine: Engine, request: SynthesisRequest) -> tuple[NDArray[np.int16], list[float]]:
    """Return frames [frames, groups], and the beginning of each word of the text."""
    engine.add(0, request)
    times, frames, told = WordTimes(read(request.text, TextRules(spoken_form="english")), engine.info), [], []
    frame_s = engine.info.frame_samples / engine.info.sample_rate
    while not engine.is_idle:
        for _, chunk in engine.step().chunks:
            frames.append(chunk.codes)
            heard = tuple(
                ((reading.first + number + 0.5) * frame_s, chars)
                for reading in chunk.readings
                for number, chars in enumerate(reading.chars)
            )
            audio = bytes(2 * engine.info.frame_samples * len(chunk.codes))
            times.feed(PcmChunk(audio, chunk.codes, 0, chunk.finish_reason, text_positions=heard))
            told += times.take()
    return np.concatenate(frames), [word.start_s for word in told]


def _beginnings(heard: Phones, words: list[list[int]]) -> list[int | None] | None:
    """Return the phone in which each word begins; None for a word whose first phoneme was not found.

    Returns None if the voice said something else.
    """
    runs = [place for place, phone in enumerate(heard) if phone > _SPACE and (not place or phone != heard[place - 1])]
    expected = [phone for word in words for phone in word]
    matcher = SequenceMatcher(None, expected, heard[runs].tolist(), autojunk=False)
    if matcher.ratio() < _LEAST_ALIKE:
        return None
    blocks = matcher.get_matching_blocks()
    places = {block.a + number: runs[block.b + number] for block in blocks for number in range(block.size)}
    firsts = accumulate(map(len, words[:-1]), initial=0)
    return [places.get(first) for first in firsts]


if __name__ == "__main__":
    main()
