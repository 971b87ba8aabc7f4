"""Transcribe a book of `talkray book` and compare each paragraph at its reported position with its text.

    talkray book novel.epub && python -m tools.listening.book novel.m4b

Prints the share of misrecognised words, counted as in `make listen`, and the worst paragraphs. A paragraph at a wrong
position counts as misrecognised. The command takes between a fifth and half of the book's duration.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from deployments.errors import TalkrayError
from talkray_tools.arguments import run_command
from talkray_tools.book.__main__ import book
from talkray_tools.recogniser import Whisper, plain_words, word_errors
from talkray_tools.ways import RATE as WAYS_RATE
from talkray_tools.ways import UtteranceFailed

RATE = 16000
_WORST = 5


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.listening.book", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("book", type=Path, help="m4b, mp3, opus, flac or wav, next to its report")
    options = parser.parse_args(arguments)
    report = json.loads(options.book.with_suffix(".report.json").read_text(encoding="utf-8"))
    audio, ear = decoded(options.book), Whisper()
    heard: list[tuple[int, int, str, str]] = []  # errors, words, text, transcript
    chapters: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])  # errors and words
    for each in report["paragraphs"]:
        said = ear.transcribe(audio[round(each["start_s"] * RATE) : round(each["end_s"] * RATE)], RATE)
        wanted = plain_words(each["text"])
        num_errors = word_errors(wanted, plain_words(said))
        heard.append((num_errors, len(wanted), each["text"], said))
        chapters[each["chapter"]][0] += num_errors
        chapters[each["chapter"]][1] += len(wanted)
    errors, words = (sum(column) for column in list(zip(*heard, strict=True))[:2])
    print(f"{len(heard)} paragraphs, {words} words, {errors} wrong: {errors / words:.1%}")
    for title, (num_errors, num_words) in chapters.items():
        print(f"  {title}: {num_errors} of {num_words}")
    for wrong, num_words, text, said in sorted(heard, reverse=True)[:_WORST]:
        print(f"{wrong} of {num_words}: {text}\n  heard: {said}")


def read_aloud(
    texts: Sequence[str], folder: Path, *, url: str, voice: str, language: str, seed: int
) -> list[NDArray[np.float32]]:
    """Synthesize the texts as paragraphs of a book, and cut them out at their reported positions.

    Raises `UtteranceFailed`. A complete book in `folder` is used again.
    """
    file, target = folder / "book.txt", folder / "book.flac"
    file.write_text("\n\n".join(texts), encoding="utf-8")
    options = ["--voice", voice, "--language", language, "--seed", str(seed)]
    try:
        code = run_command(book, "talkray book", [str(file), "-o", str(target), "--url", url, *options])
    except TalkrayError as error:
        raise UtteranceFailed(f"talkray book: {error}") from None
    if code:
        raise UtteranceFailed(f"talkray book: exit code {code}")
    paragraphs = json.loads(target.with_suffix(".report.json").read_text(encoding="utf-8"))["paragraphs"]
    if len(paragraphs) != len(texts):
        raise UtteranceFailed(f"the book has {len(paragraphs)} paragraphs of {len(texts)} texts")
    audio = decoded(target, WAYS_RATE)
    return [audio[round(each["start_s"] * WAYS_RATE) : round(each["end_s"] * WAYS_RATE)] for each in paragraphs]


def decoded(file: Path, rate: int = RATE) -> NDArray[np.float32]:
    """Decode the whole book to [samples] at `rate`. One hour takes 230 MB at RATE.

    Raises `av.FFmpegError`.
    """
    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    with av.open(str(file)) as opened:
        frames = [part for frame in opened.decode(audio=0) for part in resampler.resample(frame)]
    return np.concatenate([frame.to_ndarray()[0] for frame in [*frames, *resampler.resample(None)]])


if __name__ == "__main__":
    main()
