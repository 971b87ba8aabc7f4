"""First step: the teacher reads the texts on all cores.

    python -m tools.demo_voice.synthesize RUN --hours 72 --teacher-wheel DIR

Writes RUN/audio.i16, RUN/index.jsonl and RUN/phones.u8: which sound each PHONE_SAMPLES samples are, without which
neither the codec nor the talker learns to be understood in the minutes it has. Finished parts are kept under RUN/parts,
where a second call goes on, until they are joined.
"""

import argparse
import json
import logging
import multiprocessing
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tools.demo_voice.manners import MANNERS
from tools.demo_voice.shape import PHONE_SAMPLES
from tools.demo_voice.speakers import VOICES
from tools.demo_voice.teacher import SAMPLE_RATE, Teacher
from tools.demo_voice.texts import Line, lines

logger = logging.getLogger(__name__)

_PART = 100  # lines
_SMOKE_LINES = 24
_FULL_SCALE = 32767

_teacher: Teacher | None = None  # of a worker process


def synthesize(run: Path, texts: list[Line], *, wheels: Path | None, processes: int) -> None:
    """Read all texts; parts that exist already are not read again."""
    parts = run / "parts"
    if (run / "index.jsonl").exists():
        logger.info("already done")
        return
    parts.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # a process per core already
    jobs = [(parts / f"{first:06d}", texts[first : first + _PART], first) for first in range(0, len(texts), _PART)]
    missing = [job for job in jobs if not job[0].with_suffix(".jsonl").exists()]
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(processes, _load_teacher, (wheels,)) as pool:
        for done, _ in enumerate(pool.imap_unordered(_read_part, missing), start=1):
            elapsed_s = time.perf_counter() - begin
            if done % 10 == 0 or done == len(missing):
                left_s = elapsed_s / done * (len(missing) - done)
                logger.info(f"part {done}/{len(missing)}, {elapsed_s:.0f} s, {left_s:.0f} s left")
    _join(run, [job[0] for job in jobs])


def _load_teacher(wheels: Path | None) -> None:
    global _teacher  # one per process, which is what a pool's initializer is for
    _teacher = Teacher.load(wheels)


def _read_part(job: tuple[Path, list[Line], int]) -> None:
    """Samples first, index last and renamed: a part with an index is complete."""
    assert _teacher is not None
    path, texts, first = job
    rows = []
    with path.with_suffix(".i16").open("wb") as samples, path.with_suffix(".u8").open("wb") as phones:
        for seed, line in enumerate(texts, start=first):
            speech = _teacher.speak(line.text, line.voice, MANNERS[line.manner], seed=seed)
            count = len(speech.audio)
            if count:
                samples.write((speech.audio * _FULL_SCALE).round().astype("<i2").tobytes())
                phones.write(speech.phones.tobytes())
                rows.append({**asdict(line), "samples": count})
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    scratch.rename(path.with_suffix(".jsonl"))


def _join(run: Path, parts: list[Path]) -> None:
    start = 0
    totals = dict.fromkeys(VOICES, 0)
    for name, suffix in (("audio.i16", ".i16"), ("phones.u8", ".u8")):
        with (run / name).open("wb") as joined:
            for part in parts:
                with part.with_suffix(suffix).open("rb") as source:
                    shutil.copyfileobj(source, joined, 1 << 24)
    with (run / "index.new").open("w", encoding="utf-8") as index:
        for part in parts:
            for text in part.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines():
                row = json.loads(text)
                index.write(json.dumps({**row, "start": start}) + "\n")
                start += row["samples"]
                totals[row["voice"]] += row["samples"]
    assert (run / "audio.i16").stat().st_size == start * np.dtype(np.int16).itemsize
    assert (run / "phones.u8").stat().st_size * PHONE_SAMPLES == start
    (run / "index.new").rename(run / "index.jsonl")
    shutil.rmtree(run / "parts")  # as large as the audio
    hours = ", ".join(f"{voice} {samples / SAMPLE_RATE / 3600:.2f} h" for voice, samples in totals.items())
    logger.info(f"{start / SAMPLE_RATE / 3600:.2f} h: {hours}")


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_voice.synthesize")
    parser.add_argument("run", type=Path)
    parser.add_argument("--hours", type=float, default=72)
    parser.add_argument("--teacher-wheel", type=Path, help="directory with hibari_tts-*.whl, where it is not installed")
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
