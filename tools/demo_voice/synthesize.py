"""First step: let the teacher read the texts, on all cores.

    python -m tools.demo_voice.synthesize RUN --hours 72 --teacher-wheel DIR

Writes RUN/audio.i16, RUN/phones.u8 and RUN/index.jsonl. The phones name the sound of each PHONE_SAMPLES samples.
Without them, codec and talker would not become intelligible in a few minutes of training. The index is written last;
if it is missing, the next call starts over.
"""

import argparse
import json
import logging
import multiprocessing
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tools.demo_voice.manners import MANNERS
from tools.demo_voice.shape import PHONE_SAMPLES
from tools.demo_voice.speakers import VOICES
from tools.demo_voice.teacher import SAMPLE_RATE, Teacher
from tools.demo_voice.texts import Line, lines

logger = logging.getLogger(__name__)

_PART = 20  # lines that a process synthesizes at a time
_SMOKE_LINES = 24
_FULL_SCALE = 32767

_teacher: Teacher | None = None  # set in worker processes


def synthesize(run: Path, texts: list[Line], *, wheels: Path | None, processes: int) -> None:
    """Read all texts, except those that the teacher cannot read."""
    if (run / "index.jsonl").exists():
        logger.info("already done")
        return
    run.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # there is one process per core already
    start, totals, scratch = 0, dict.fromkeys(VOICES, 0), run / "index.new"
    with (
        multiprocessing.get_context("spawn").Pool(processes, _load_teacher, (wheels,)) as pool,
        (run / "audio.i16").open("wb") as samples,
        (run / "phones.u8").open("wb") as phones,
        scratch.open("w", encoding="utf-8") as index,
    ):
        read = pool.imap(_read, enumerate(texts), chunksize=_PART)
        for number, (line, (audio, sounds)) in enumerate(zip(texts, read, strict=True)):
            if number % 2000 == 0:
                logger.info(f"{number} of {len(texts)}")
            samples.write(audio)
            phones.write(sounds)
            if count := len(sounds) * PHONE_SAMPLES:
                index.write(json.dumps({**asdict(line), "samples": count, "start": start}) + "\n")
                start += count
                totals[line.voice] += count
    scratch.rename(run / "index.jsonl")
    hours = ", ".join(f"{voice} {samples / SAMPLE_RATE / 3600:.2f} h" for voice, samples in totals.items())
    logger.info(f"{start / SAMPLE_RATE / 3600:.2f} h: {hours}")


def _load_teacher(wheels: Path | None) -> None:
    global _teacher  # one per process, set by the pool's initializer
    _teacher = Teacher.load(wheels)


def _read(job: tuple[int, Line]) -> tuple[bytes, bytes]:
    """Return samples and sounds in the format of the files; both empty if the teacher cannot read the line."""
    assert _teacher is not None
    seed, line = job
    speech = _teacher.speak(line.text, line.voice, MANNERS[line.manner], seed=seed)
    assert len(speech.audio) == len(speech.phones) * PHONE_SAMPLES
    return (speech.audio * _FULL_SCALE).round().astype("<i2").tobytes(), speech.phones.tobytes()


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_voice.synthesize")
    parser.add_argument("run", type=Path)
    parser.add_argument("--hours", type=float, default=72)
    parser.add_argument("--teacher-wheel", type=Path, help="directory with hibari_tts-*.whl, if it is not installed")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few lines only")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    texts = lines(options.hours, tuple(VOICES), seed=options.seed)
    if options.smoke:
        texts = texts[:4] + texts[-_SMOKE_LINES + 4 :]
    synthesize(options.run, texts, wheels=options.teacher_wheel, processes=options.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
