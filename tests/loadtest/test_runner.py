import asyncio
import contextlib
import io
import json
import wave
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from loadtest.arrivals import INSTRUCTION, Phase, Profile, RequestKind, ScheduledRequest, SpeechLengths
from loadtest.clients import open_session, speak
from loadtest.measure import measure
from loadtest.recording import Recording
from loadtest.runner import Runner, WarmupFailedError
from loadtest.settings import Settings
from loadtest.tables import kind_table, run_facts
from loadtest.terminal import Screen, progress_line
from loadtest.traces import Clock, Failure, Trace, TraceFolder
from tests.loadtest.test_metrics import SPOKEN, failed

pytestmark = pytest.mark.anyio

LOUD = b"\x00\x40" * 2400  # 0.1 s at 24 kHz
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(
    handler: Handler, path: str = "/v1/audio/speech", method: str = "POST", **settings: Any
) -> AsyncIterator[Settings]:
    app = web.Application()
    app.router.add_route(method, path, handler)
    async with TestServer(app) as server:
        yield Settings(str(server.make_url("/")), **{"options": {"model": "m"}, "timeout_s": 10.0, **settings})


async def begin(request: web.Request, *audio: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "audio/pcm", "X-Request-Id": "r7"})
    await response.prepare(request)
    for data in audio:
        await response.write(data)
    return response


async def speak_at_once(request: web.Request) -> web.StreamResponse:
    return await begin(request, LOUD)


def schedule(*texts: str) -> list[ScheduledRequest]:
    return [ScheduledRequest(index, 0.0, text) for index, text in enumerate(texts)]


def written(path: Path) -> list[Trace]:
    return [Trace.from_json(json.loads(line)) for line in path.read_text().splitlines()]


async def traced(target: Settings, folder: Path, requests: list[ScheduledRequest]) -> list[Trace]:
    runner = Runner(target, requests, folder=TraceFolder(folder))
    assert await runner.run()
    assert written(folder / "requests.jsonl") == runner.traces
    return runner.traces


async def run(target: Settings, folder: Path, *texts: str) -> dict[str, Trace]:
    return {texts[trace.index]: trace for trace in await traced(target, folder, schedule(*texts))}


async def run_kind(target: Settings, folder: Path, kind: RequestKind) -> Trace:
    return (await traced(target, folder, [ScheduledRequest(0, 0.0, "text", kind=kind)]))[0]


def wav(pcm: bytes, *, sample_bytes: int = 2) -> bytes:
    written_file = io.BytesIO()
    with wave.open(written_file, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(sample_bytes)
        file.setframerate(48000)
        file.writeframes(pcm)
    return written_file.getvalue()


async def test_a_file_that_is_not_streamed_is_read_as_a_whole(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert (body["response_format"], body["stream"]) == ("wav", False)
        return web.Response(body=wav(LOUD), content_type="audio/wav")

    async with serving(handler) as target:
        trace = await run_kind(target, tmp_path, RequestKind.WHOLE)
    assert (trace.failure, trace.audio_s, trace.ttfb_s) == (None, 0.05, None)
    assert target.limits.met_by(trace)


@pytest.mark.parametrize("body", [LOUD, b"", wav(LOUD, sample_bytes=4), wav(b"")])
async def test_what_is_no_file_of_samples_is_not_audio(tmp_path: Path, body: bytes) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="audio/wav")

    async with serving(handler) as target:
        assert (await run_kind(target, tmp_path, RequestKind.WHOLE)).failure is Failure.NOT_AUDIO


@pytest.mark.parametrize("chunks", [0, 1])
async def test_who_leaves_early_has_not_failed(tmp_path: Path, chunks: int) -> None:
    gone = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = await begin(request, *[LOUD] * chunks)
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return response

    async with serving(handler) as target:
        trace = await run_kind(target, tmp_path, RequestKind.LEAVES)
        await gone.wait()
    assert trace.failure is None
    assert trace.left_s is not None
    assert trace.finished_s - trace.sent_s < 1.0
    assert (trace.ttfb_s is not None) == target.limits.met_by(trace) == bool(chunks)


async def test_a_slow_reader_reads_as_it_plays_and_never_runs_dry(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        for _ in range(8):
            await response.write(LOUD)
            await asyncio.sleep(0.01)
        return response

    async with serving(handler) as target:
        trace = await run_kind(target, tmp_path, RequestKind.SLOW)
    assert trace.finished_s - trace.sent_s >= 0.2  # 0.8 s of audio but for half a second
    assert trace.playback is not None
    assert trace.playback.underruns == 0


async def test_mixed_traffic_is_told_by_kind(tmp_path: Path) -> None:
    bodies: list[dict[str, object]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(body := await request.json())
        if body["response_format"] == "wav":
            return web.Response(body=wav(LOUD), content_type="audio/wav")
        if "instructions" in body:
            said = "The server is at its limit (being spoken: 7); more replicas raise the limit (0.25)."
            return web.json_response({"error": {"message": said}}, status=429)
        return await speak_at_once(request)

    async with serving(handler) as served:
        target = replace(
            served, phases=(Phase("all", 60.0, 1.0),), profile=Profile.MIXED, lengths=SpeechLengths(1.0, 0.1), seed=3
        )
        result, _ = await measure(target, TraceFolder(tmp_path / "run"), show=lambda _: None)
    number = len(target.schedule())
    assert number > 40
    kinds = {each.title: each.summary for each in result.by_kind}
    assert set(kinds) == {kind.value for kind in RequestKind}
    assert sum(each.sent for each in kinds.values()) == number
    instructed = kinds[RequestKind.INSTRUCTED.value]
    assert instructed.refused == instructed.sent
    assert instructed.refusals == {"The server is at its limit; more replicas raise the limit.": instructed.sent}
    assert "The server is at its limit" in run_facts(result)["Refusals"]
    assert kinds[RequestKind.WHOLE.value].ttfa_s is None
    assert kinds[RequestKind.PARAGRAPH.value].ttfa_s is not None
    assert [row[1] for row in kind_table([result]).rows] == list(kinds)
    assert result.audio_made_per_s == pytest.approx(sum(trace.audio_s for trace in result.traces), rel=0.1)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["kinds"]) == set(kinds)
    assert {body["instructions"] for body in bodies if "instructions" in body} == {INSTRUCTION}
    long = [body for body in bodies if len(str(body["input"])) > 1000]
    assert {body["max_new_tokens"] for body in long} == {276}  # of each of the two segments


async def test_no_request_waits_for_another(tmp_path: Path) -> None:
    arrived: list[str] = []
    all_here = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        arrived.append((await request.json())["input"])
        if len(arrived) == 4:
            all_here.set()
        await all_here.wait()
        return await speak_at_once(request)

    texts = [f"text {index}" for index in range(4)]
    async with serving(handler) as target:
        traces = await run(target, tmp_path, *texts)
    assert sorted(arrived) == sorted(texts)
    assert all(trace.failure is None for trace in traces.values())


async def test_audio_is_recorded_while_the_server_still_speaks() -> None:
    class Watched(Recording):
        def receive(self, data: bytes) -> None:
            super().receive(data)
            heard.set()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        for _ in range(3):
            heard.clear()
            await response.write(LOUD)
            await heard.wait()
        return response

    heard = asyncio.Event()
    recording = Watched(ScheduledRequest(0, 0.0, "Hi."), Clock.started())
    async with serving(handler) as target, open_session() as session:
        await speak(session, target, recording=recording)
    trace = recording.finish()
    assert trace.failure is None
    assert trace.chunks[-1][1] == trace.num_bytes == 3 * len(LOUD)
    assert len(trace.chunks) >= 3
    assert trace.first_byte_s == trace.chunks[0][0] == trace.first_playable_s == trace.first_audible_s
    assert trace.sent_s < trace.chunks[0][0] < trace.chunks[1][0] < trace.finished_s


async def test_every_outcome_is_traced(tmp_path: Path) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        body = {"error": {"message": "try later"}}
        return web.json_response(body, status=429, headers={"Retry-After": "3"})

    async def break_down(_: web.Request) -> web.StreamResponse:
        return web.Response(status=500, text="oh no")

    async def abort(request: web.Request) -> web.StreamResponse:
        response = await begin(request, LOUD)
        assert request.transport
        request.transport.close()
        return response

    async def say_nothing(request: web.Request) -> web.StreamResponse:
        return await begin(request)

    async def hang_up(request: web.Request) -> web.StreamResponse:
        assert request.transport
        request.transport.close()
        return web.Response()

    async def send_mp3(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b"ID3", content_type="audio/mpeg")

    async def cut_a_sample(request: web.Request) -> web.StreamResponse:
        return await begin(request, LOUD + b"\x00")

    handlers: dict[str, Handler] = {
        handler.__name__: handler
        for handler in (speak_at_once, refuse, break_down, abort, say_nothing, hang_up, send_mp3, cut_a_sample)
    }

    async def dispatch(request: web.Request) -> web.StreamResponse:
        return await handlers[(await request.json())["input"]](request)

    async with serving(dispatch) as target:
        traces = await run(target, tmp_path, *handlers)
    assert {text: (trace.status, trace.failure) for text, trace in traces.items()} == {
        "speak_at_once": (200, None), "refuse": (429, Failure.REFUSED), "break_down": (500, Failure.HTTP),
        "abort": (200, Failure.BROKEN_BODY), "say_nothing": (200, Failure.NOT_AUDIO),
        "hang_up": (None, Failure.CONNECTION), "send_mp3": (200, Failure.NOT_AUDIO),
        "cut_a_sample": (200, Failure.NOT_AUDIO),
    }  # fmt: skip
    assert (traces["speak_at_once"].request_id, traces["speak_at_once"].audio_s) == ("r7", 0.1)
    assert (traces["refuse"].error, traces["refuse"].retry_after_s) == ("try later", 3.0)
    assert (traces["break_down"].error, traces["abort"].chunks[-1][1]) == ("oh no", len(LOUD))


async def test_an_answer_that_never_ends_times_out(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = await begin(request, LOUD)
        await asyncio.Event().wait()
        return response

    async with serving(handler) as target:
        impatient = replace(target, timeout_s=0.2)
        trace = (await run(impatient, tmp_path, "Hi."))["Hi."]
    assert (trace.failure, trace.error) == (Failure.TIMEOUT, "no complete response within 0.2 s")


async def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    class Watched(TraceFolder):
        def append_trace(self, trace: Trace, name: str = "requests.jsonl") -> None:
            super().append_trace(trace, name)
            measured.set()

    async def handler(request: web.Request) -> web.StreamResponse:
        if (await request.json())["input"] == "quick":
            return await speak_at_once(request)
        await measured.wait()
        runner.interrupt()
        await asyncio.Event().wait()
        return web.Response()

    measured = asyncio.Event()
    plan = [*schedule("quick", "endless"), ScheduledRequest(2, 3600.0, "never sent")]
    async with serving(handler) as target:
        runner = Runner(target, plan, folder=Watched(tmp_path))
        assert not await runner.run()
    traces = written(tmp_path / "requests.jsonl")
    assert [(trace.index, trace.failure) for trace in traces] == [(0, None), (1, Failure.INTERRUPTED)]
    assert runner.sent == len(runner.traces) == 2


async def test_warm_up_comes_first_and_apart(tmp_path: Path) -> None:
    arrived: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        arrived.append((await request.json())["input"])
        return await speak_at_once(request)

    async with serving(handler) as target:
        runner = Runner(target, schedule("real"), folder=TraceFolder(tmp_path))
        assert await runner.run(warmup=schedule("first", "second"))
    assert arrived == ["first", "second", "real"]
    assert len(written(tmp_path / "warmup.jsonl")) == 2
    assert len(runner.traces) == len(written(tmp_path / "requests.jsonl")) == 1


async def test_a_failed_warm_up_stops_the_run(tmp_path: Path) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "still loading"}}, status=503)

    async with serving(handler) as target:
        runner = Runner(target, schedule("real"), folder=TraceFolder(tmp_path))
        with pytest.raises(WarmupFailedError, match=r"Warm-up request 1 failed \(HTTP 503\): still loading"):
            await runner.run(warmup=schedule("first"))
    assert not (tmp_path / "requests.jsonl").exists()


@pytest.mark.parametrize(("refusals", "begins"), [(4, True), (5, False)])
async def test_a_refused_warm_up_is_sent_again_as_advised(tmp_path: Path, refusals: int, begins: bool) -> None:
    asked = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked > refusals:
            return await speak_at_once(request)
        return web.json_response({"error": {"message": "full"}}, status=429, headers={"retry-after-ms": "1"})

    async with serving(handler) as target:
        runner = Runner(target, schedule("real"), folder=TraceFolder(tmp_path))
        failing = pytest.raises(WarmupFailedError, match=r"Warm-up request 1 failed \(HTTP 429\): full")
        with contextlib.nullcontext() if begins else failing:
            assert await runner.run(warmup=schedule("first"))
    assert len(written(tmp_path / "warmup.jsonl")) == 5
    assert (tmp_path / "requests.jsonl").exists() is begins


def under_way(folder: Path) -> Runner:
    runner = Runner(Settings("http://h:1"), schedule("a", "b", "c", "d", "e"), folder=TraceFolder(folder / "four"))
    for _ in range(3):
        runner.note(0.004)
    runner.note(SPOKEN)
    runner.note(failed(Failure.REFUSED, 429))
    return runner


@pytest.mark.parametrize("terminal", [True, False])
async def test_progress_is_shown_with_and_without_a_terminal(terminal: bool, tmp_path: Path) -> None:
    console = Console(force_terminal=terminal, width=200, record=True)
    screen = Screen(console)
    screen.show(under_way(tmp_path))
    async with screen.shown():
        await asyncio.sleep(0)
    text = console.export_text()
    assert "3/5" in text
    assert "100 ms" in text


def test_a_progress_line_names_its_numbers(tmp_path: Path) -> None:
    runner = under_way(tmp_path)
    assert progress_line(runner) == (
        "four: time warm-up  sent 3/5  running 1  spoken 1  refused 1  failed 0  "
        "TTFB p50 100 ms  TTFB p95 100 ms  max lag 4 ms"
    )
    runner.traces.clear()
    assert "TTFB p50 -  TTFB p95 -" in progress_line(runner), "before the first answer"


def test_lines_of_the_schedule_are_json(tmp_path: Path) -> None:
    TraceFolder(tmp_path).write_schedule(schedule("a", "b"))
    lines = [json.loads(line) for line in (tmp_path / "schedule.jsonl").read_text().splitlines()]
    assert lines[1] == {"index": 1, "planned_s": 0.0, "text": "b", "frames": None, "interrupt_s": None, "kind": None}
