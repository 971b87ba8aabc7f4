"""Listens to a book of `talkray book`: what a recogniser hears of each paragraph, where the report says that it is.

    talkray book novel.epub && python -m tools.listening.book novel.m4b

Prints the share of words that it hears otherwise, as `make listen` counts them, and the worst paragraphs. A paragraph
that is not where the report has it is one that is not understood. It takes a fifth to a half of the book's length.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from talkray_tools.recogniser import Whisper, plain_words, word_errors

RATE = 16000
_WORST = 5


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.listening.book", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("book", type=Path, help="m4b, mp3, opus, flac or wav, beside its report")
    parser.add_argument("--most", type=int, default=None, help="of its paragraphs")
    options = parser.parse_args(arguments)
    report = json.loads(options.book.with_suffix(".report.json").read_text(encoding="utf-8"))
    audio, ear = decoded(options.book), Whisper()
    heard: list[tuple[int, int, str, str]] = []  # errors, words, as it was written, as it was heard
    chapters: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])  # errors and words
    for each in report["paragraphs"][: options.most]:
        said = ear.transcribe(audio[round(each["start_s"] * RATE) : round(each["end_s"] * RATE)], RATE)
        wanted = plain_words(each["text"])
        num_errors = word_errors(wanted, plain_words(said))
        heard.append((num_errors, len(wanted), each["text"], said))
        chapters[each["chapter"]][0] += num_errors
        chapters[each["chapter"]][1] += len(wanted)
    errors, words = (sum(column) for column in list(zip(*heard, strict=True))[:2])
    print(f"{len(heard)} paragraphs, {words} words, {errors} heard otherwise: {errors / words:.1%}")
    for title, (num_errors, num_words) in chapters.items():
        print(f"  {title}: {num_errors} of {num_words}")
    for wrong, num_words, text, said in sorted(heard, reverse=True)[:_WORST]:
        print(f"{wrong} of {num_words}: {text}\n  heard: {said}")


def decoded(file: Path) -> NDArray[np.float32]:
    """[samples] at RATE, of all of the book: an hour takes 230 MB.

    Raises av.FFmpegError.
    """
    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
    with av.open(str(file)) as opened:
        frames = [part for frame in opened.decode(audio=0) for part in resampler.resample(frame)]
    return np.concatenate([frame.to_ndarray()[0] for frame in [*frames, *resampler.resample(None)]])


if __name__ == "__main__":
    main()
