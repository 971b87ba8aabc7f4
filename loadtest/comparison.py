"""Compare two servers, each in its own dialect, with the same texts at the same times, and then under overload.

Turns alternate (A, B, then B, A), so any drift in the machine's speed affects both servers. Both servers use the same
seed in a turn, and each turn has its own folder of traces.
"""

import asyncio
import json
import sys
import wave
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.arrivals import LEAVES_S, Phase, RequestKind, ScheduledRequest, Texts, choose_texts, settled
from loadtest.clients import open_session, speak
from loadtest.measure import Result, Show, check_server, measure
from loadtest.recording import Recording
from loadtest.runner import Runner
from loadtest.settings import Settings
from loadtest.traces import Clock, LoadTestError, Trace, TraceFolder

LEAVERS, ROUNDS, ROUND_S = 8, 3, 2.0  # clients that leave simultaneously, repetitions, and seconds between repetitions
_BEHIND_S = 0.05  # delay between their departure and the next request
_RECOGNISER = "talkray_tools.recogniser"  # command to run in a separate process
_HEARD_S = 120.0


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two compared servers."""

    letter: str
    settings: Settings  # without phases

    @property
    def name(self) -> str:
        return f"{self.letter}: {self.settings.dialect}, {self.settings.url}"


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """Load for both servers."""

    rate: float
    duration_s: float
    settle_s: float
    turns: int
    overload: float  # factor of the rate; 0: no overload
    overload_s: float
    words: int  # number of responses to transcribe per server


@dataclass(frozen=True, slots=True)
class Leaving:
    """Seconds to the first byte of a single request, on an idle server and just after other clients have left."""

    leavers: int
    alone_s: list[float]
    behind_s: list[float]
    failed: int  # in both situations


@dataclass(frozen=True, slots=True)
class WordsHeard:
    """Comparison of a recogniser's transcripts with the texts."""

    errors: int
    words: int
    answers: int


@dataclass(frozen=True, slots=True)
class Compared:
    """Results of one server."""

    side: Side
    turns: list[Result]
    overload: Result | None
    leaving: Leaving
    heard: WordsHeard | str  # transcripts, or why there are none

    @property
    def traces(self) -> list[Trace]:
        """Traces of all measured turns."""
        return [trace for turn in self.turns for trace in turn.measured]


async def compare(sides: Sequence[Side], plan: TurnPlan, *, folder: Path, show: Show) -> list[Compared]:
    """Compare the servers. Raises `LoadTestError`, including on Ctrl-C, because an incomplete comparison is invalid."""
    TraceFolder(folder).check_unused()
    for side in sides:
        await check_server(side.settings)
    turns: dict[str, list[Result]] = {side.letter: [] for side in sides}
    for turn in range(plan.turns):
        for side in sides if turn % 2 == 0 else list(reversed(sides)):
            phases = settled(plan.rate, plan.duration_s, settle_s=plan.settle_s)
            warmup = 0 if turn else side.settings.warmup
            own = replace(side.settings, phases=phases, seed=side.settings.seed + turn, warmup=warmup)
            turns[side.letter].append(await _measured(own, folder / f"{side.letter}-turn-{turn + 1}", show))
    done = []
    for side in sides:
        overload = None
        if plan.overload:
            phases = (Phase("overload", plan.rate * plan.overload, plan.overload_s),)
            own = replace(side.settings, phases=phases, warmup=0)
            overload = await _measured(own, folder / f"{side.letter}-overload", show)
        leaving = await _leave(side.settings, TraceFolder(folder / f"{side.letter}-leaving"), show)
        heard = await _hear(side.settings, plan.words, TraceFolder(folder / f"{side.letter}-words"))
        done.append(Compared(side, turns[side.letter], overload, leaving, heard))
    return done


async def _measured(settings: Settings, folder: Path, show: Show) -> Result:
    result, is_complete = await measure(settings, TraceFolder(folder), show=show)
    if not is_complete:
        raise LoadTestError(f"interrupted: the comparison is incomplete. The traces so far are in {folder}")
    return replace(result, title=folder.name)


async def _leave(settings: Settings, folder: TraceFolder, show: Show) -> Leaving:
    """Test whether a server keeps working for clients that have left, which would delay the next request."""
    texts = Texts.PARAGRAPHS.choices()
    alone = [ScheduledRequest(n, n * ROUND_S, texts[n]) for n in range(ROUNDS)]
    schedule = list(alone)
    for number in range(ROUNDS):
        at_s = (ROUNDS + number) * ROUND_S
        left = (ScheduledRequest(0, at_s, text, kind=RequestKind.LEAVES) for text in texts[:LEAVERS])
        schedule += [*left, ScheduledRequest(0, at_s + LEAVES_S + _BEHIND_S, texts[number])]
    lengths = settings.lengths  # None: the server does not accept planned lengths
    for index, each in enumerate(schedule):
        schedule[index] = replace(each, index=index, frames=lengths.draw(1, seed=index)[0] if lengths else None)
    folder.write_schedule(schedule)
    runner = Runner(replace(settings, phases=(Phase("leaving", 1.0, 2 * ROUNDS * ROUND_S),)), schedule, folder=folder)
    show(runner)
    if not await runner.run():
        raise LoadTestError(f"interrupted: the comparison is incomplete. The traces so far are in {folder.path}")
    asked = [trace for trace in folder.read_traces() if trace.kind is None]
    border_s = ROUNDS * ROUND_S
    before = [trace.ttfb_s for trace in asked if trace.planned_s < border_s and trace.ttfb_s is not None]
    behind = [trace.ttfb_s for trace in asked if trace.planned_s >= border_s and trace.ttfb_s is not None]
    return Leaving(LEAVERS, before, behind, len(asked) - len(before) - len(behind))


async def _hear(settings: Settings, count: int, folder: TraceFolder) -> WordsHeard | str:
    """In a few responses, count the words that a recogniser transcribes differently from the text."""
    if not count:
        return "not measured (--words 0)"
    if settings.lengths is not None:
        return "not measured, because responses of planned length may end within a word"
    texts = choose_texts(count, seed=settings.seed, texts=Texts.ONE_SENTENCE.choices())
    folder.write_schedule([ScheduledRequest(number, 0.0, text) for number, text in enumerate(texts)])
    errors = words = answers = 0
    async with open_session() as session:
        for number, text in enumerate(texts):
            recording = Recording(ScheduledRequest(number, 0.0, text), Clock.started())
            recording.kept = bytearray()
            await speak(session, settings, recording=recording)
            trace = recording.finish()
            folder.append_trace(trace)
            if trace.failure is not None or trace.layout is None:
                continue
            file = folder.path / f"{number}.wav"
            _write_wav(file, bytes(recording.kept), trace)
            said = await _recognise(file, text)
            if isinstance(said, str):
                return f"{said}; the audio is in {folder.path}"
            folder.append("heard.jsonl", {"text": text, **said})
            errors, words, answers = errors + said["errors"], words + said["words"], answers + 1
    return WordsHeard(errors, words, answers) if answers else "all of their requests failed"


def _write_wav(file: Path, pcm: bytes, trace: Trace) -> None:
    assert trace.layout is not None
    with wave.open(str(file), "wb") as written:
        written.setnchannels(trace.layout.channels)
        written.setsampwidth(2)
        written.setframerate(trace.layout.sample_rate)
        written.writeframes(pcm)


async def _recognise(file: Path, text: str) -> dict[str, Any] | str:
    """Return the transcript and the number of words and errors, or the reason why transcription failed."""
    command = (sys.executable, "-m", _RECOGNISER, str(file), "--transcript", text, "--language", "english")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        out, err = await asyncio.wait_for(process.communicate(), _HEARD_S)
    except TimeoutError:
        process.kill()
        await process.communicate()
        return f"the recogniser took more than {_HEARD_S:g} s for {file.name}"
    if process.returncode == 0:
        heard: dict[str, Any] = json.loads(out.splitlines()[-1])
        return heard
    said = err.decode(errors="replace").strip()
    if "No module named" in said or "is missing" in said:
        return f"no recogniser is installed ({said.splitlines()[-1]}). docs/verify.md lists the packages"
    return f"the recogniser failed: {said.splitlines()[-1] if said else process.returncode}"


def spread(values: Sequence[float]) -> float:
    """Return the largest difference between two turns against the same server."""
    return max(values) - min(values) if values else 0.0


def middle_ms(values: Sequence[float]) -> str:
    return f"{1000 * median(values):.0f} ms" if values else "-"
