"""Read SubRip (.srt) and WebVTT (.vtt) files as books: cue texts, and cue times for dubbing."""

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from deployments.errors import InvalidRequest
from serve_app.audio.formats import Filter
from serve_app.text.splitting import sentence_ends
from talkray_tools.book.assembly import Sound
from talkray_tools.book.captions import clock
from talkray_tools.book.text import Book, Chapter, Cue, Paragraph, finished, paragraphs_of, unwrapped

MAX_SPEED = 1.3  # for a cue whose speech is longer than its time slot
_AIM_S = 0.02  # how early a sped-up cue ends, because atempo's output length is not exact
_TOLERANCE_S = 0.05  # smaller deviations from a cue's time are not reported
_LONGEST_GAP_S = 2.0  # between two cues of one sentence
_TIME = r"(?:(\d+):)?(\d{1,2}):(\d{1,2})(?:[.,](\d{1,3}))?"
_TIMES = re.compile(rf"\s*{_TIME}\s*-->\s*{_TIME}(?:\s.*)?")
_ARROW = r"\s*(?:-+\s*>|→|—>)"
_LIKE_TIMES = re.compile(rf"\s*[-+]?(?:\d[\d:.,]*\s*-->|\d+:[\d:.,]*{_ARROW})|\s*-->|.*-->\s*[-+]?\d[\d:.,]*\s*$")
_BEGINS_TIMED = re.compile(rf"WEBVTT\b|\s*(?:\d+\s*\n\s*)?{_TIME}\s*-->\s*{_TIME}")
_COMMENT = re.compile(r"(NOTE|STYLE|REGION)(?:\s|$)")
_MARKS = re.compile(
    r"<rt>.*?</rt>|</?[\w.][^<>]*>"  # a tag, optionally with a time
    r"|\{\\[^{}]*\}|\{[A-Za-z]:[^{}]*\}"  # formatting for players, such as {\an8}
    r"|^\s*[-–—]+(?:\s+|(?=\D))|^\s*\n",  # a dash that marks a change of speakers; a blank line  # noqa: RUF001
    re.M | re.S,
)


def is_timed(text: str) -> bool:
    """Return whether a file that lacks a subtitle extension contains cues."""
    return _BEGINS_TIMED.match(text) is not None


def subtitle_book(text: str, name: str, *, timed: bool) -> Book:
    """Join sentences that continue in the next cue. With `timed`, keep each cue separate, with its times.

    Raises an `InvalidRequest` that names the cue if its times are invalid or, with `timed`, cannot be kept.
    """
    book = Book(name)
    cues = list(_cues(text, book))
    if not cues:
        raise InvalidRequest("the file has no cue with times such as 00:01:02,500 --> 00:01:04,000", "file")
    if timed:
        _check_order(cues)
    with_text = [cue for cue in cues if cue.text]
    if len(with_text) < len(cues):
        book.left_out["cues without text"] += len(cues) - len(with_text)
    if timed:
        parts = [replace(part, cue=cue) for cue in with_text for part in paragraphs_of(cue.text)]
    else:
        parts = [part for joined in _sentences(with_text) for part in paragraphs_of(joined)]
    book.chapters.append(Chapter(name, parts))
    return finished(book)


@dataclass(slots=True)
class _OpenCue:
    name: str
    start_s: float
    end_s: float
    lines: list[str]


def _cues(text: str, book: Book) -> Iterator[Cue]:
    """Yield the cues in file order. Lines outside cues are counted in `book.left_out`."""
    is_vtt = text.startswith("WEBVTT")
    opened: list[_OpenCue] = []
    lines: list[str] = []  # lines of the current cue; empty outside a cue
    skipped = "header" if is_vtt else ""  # kind of block to skip
    for number, line in enumerate(text.split("\n"), start=1):
        if skipped and not (skipped == "header" and _LIKE_TIMES.match(line)):
            skipped = skipped if line.strip() else ""
        elif is_vtt and not (lines or _is_open(lines, opened)) and (found := _COMMENT.match(line)):
            book.left_out[f"{found[1]} blocks"] += 1
            skipped = found[1]
        elif _LIKE_TIMES.match(line):
            name = f"cue {_identifier(lines, len(opened) + 1, is_vtt=is_vtt)} (line {number})"
            _note_stray(lines, opened, book)
            lines, skipped = [], ""
            opened.append(_OpenCue(name, *_times(line, name), lines))
        elif is_vtt and not line.strip():
            _note_stray(lines, opened, book)
            lines = []
        else:
            lines.append(line)
    _note_stray(lines, opened, book)
    for each in opened:
        said = html.unescape(_MARKS.sub("", "\n".join(each.lines).strip()))
        yield Cue(each.name, unwrapped(said).strip(), each.start_s, each.end_s)


def _is_open(lines: list[str], opened: list[_OpenCue]) -> bool:
    return bool(opened) and opened[-1].lines is lines


def _note_stray(lines: list[str], opened: list[_OpenCue], book: Book) -> None:
    if any(line.strip() for line in lines) and not _is_open(lines, opened):
        book.left_out["lines outside cues"] += sum(bool(line.strip()) for line in lines)


def _identifier(lines: list[str], ordinal: int, *, is_vtt: bool) -> str:
    """Pop a cue's identifier from `lines`: a number in SubRip, or any line before the times in WebVTT."""
    while len(lines) > 1 and not lines[-1].strip() and lines[-2].strip() in ("", str(ordinal)):
        lines.pop()  # drop the blank lines of files that have one after each line
    if lines and lines[-1].strip() and (is_vtt or lines[-1].strip().isdigit()):
        return lines.pop().strip()
    return str(ordinal)


def _times(line: str, name: str) -> tuple[float, float]:
    found = _TIMES.fullmatch(line)
    if found is None or any(int(found[group]) > 59 for group in (2, 3, 6, 7)):
        wanted = "Write 00:01:02,500 --> 00:01:04,000"
        raise InvalidRequest(f"{name}: {line.strip()!r} is not a valid time range. {wanted}", "file")
    hours, minutes, seconds, fraction = (found.groups()[first::4] for first in range(4))
    start_s, end_s = (
        3600 * int(hours[at] or 0) + 60 * int(minutes[at]) + int(seconds[at]) + float(f"0.{fraction[at] or 0}")
        for at in (0, 1)
    )
    return start_s, end_s


def _check_order(cues: Sequence[Cue]) -> None:
    """Check that the cues do not overlap. Raises an `InvalidRequest` naming the first cue with an error."""
    wrong = [f"{cue.name} ends at {clock(cue.end_s)}, begins at {clock(cue.start_s)}" for cue in cues if cue.is_empty]
    wrong += [
        f"{cue.name} begins at {clock(cue.start_s)}, before {before.name} ends at {clock(before.end_s)}"
        for before, cue in pairwise(cues)
        if cue.start_s < before.end_s
    ]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise InvalidRequest(f"{wrong[0]}{more}: correct the times, or leave out --timed", "file")


def _sentences(cues: Sequence[Cue]) -> list[str]:
    texts: list[str] = []
    ended_s = 0.0
    for cue in cues:
        text = texts[-1] if texts else ""
        is_end = not text or len(text) in sentence_ends(text, 0, len(text)) or cue.text.startswith("[")
        if is_end or cue.start_s - ended_s > _LONGEST_GAP_S:
            texts.append(cue.text)
        else:
            texts[-1] = unwrapped(f"{text}\n{cue.text}")
        ended_s = cue.end_s
    return texts


def dub(parts: Sequence[Paragraph], sounds: Sequence[Sound]) -> tuple[list[Sound], list[Mapping[str, Any]]]:
    """Place `sounds` at their cues' times, sped up where a time slot is too short.

    A cue that overruns delays the next one. Returns the sounds, and the cues that still do not fit.
    """
    placed: list[Sound] = []
    unfit: list[Mapping[str, Any]] = []
    rate, at = soundfile.info(sounds[0].audio).samplerate, 0  # in samples
    for cue, group in groupby(zip(parts, sounds, strict=True), key=lambda each: each[0].cue):
        assert cue is not None
        own = [sound for _, sound in group]
        start = max(round(cue.start_s * rate), at)
        length_s = sum(soundfile.info(sound.audio).duration for sound in own)
        room_s = cue.end_s - start / rate
        speed = 1.0 if length_s <= room_s else min(MAX_SPEED, length_s / max(_AIM_S, room_s - _AIM_S))
        for number, sound in enumerate(own):
            audio = sound.audio if speed == 1 else _faster(sound.audio, speed)
            pause_s = 0.0 if number else (start - at) / rate
            placed.append(replace(sound, audio=audio, pause_s=pause_s, speed=speed))
        at = start + sum(soundfile.info(sound.audio).frames for sound in placed[-len(own) :])
        over_s, late_s = at / rate - cue.end_s, start / rate - cue.start_s
        if max(over_s, late_s) > _TOLERANCE_S:
            told = {"speed": round(speed, 3), "over_s": round(max(0.0, over_s), 3), "late_s": round(late_s, 3)}
            unfit.append({"cue": cue.name, "start_s": round(start / rate, 3), **told, "text": cue.text})
    return placed, unfit


def _faster(audio: Path, speed: float) -> Path:
    samples, rate = soundfile.read(audio, dtype="int16")
    by = Filter(rate, speed=speed)
    pcm = by.feed(samples.astype("<i2").tobytes()) + by.close()
    file = audio.with_suffix(f".fast{audio.suffix}")
    soundfile.write(file, np.frombuffer(pcm, "<i2"), rate)
    return file
