import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from loadtest.arrivals import ScheduledRequest, interrupt
from loadtest.metrics import summarize
from loadtest.runner import Runner
from loadtest.settings import Settings, Transport
from loadtest.traces import Failure, Trace, TraceFolder
from tests.loadtest.test_runner import LOUD, schedule, serving
from tests.loadtest.test_websocket import send

pytestmark = pytest.mark.anyio

Speak = Callable[[web.WebSocketResponse], Awaitable[None]]
WORDS = ["Good", " morning", " to", " you."]
END = {"type": "SpeechMetadata"}


class Server:
    def __init__(self, speak: Speak) -> None:
        self._speak = speak
        self.written: list[str] = []
        self.query: dict[str, str] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.query = dict(request.query)
        socket = web.WebSocketResponse(timeout=0.2)
        await socket.prepare(request)
        await socket.send_json({"type": "Connected", "request_id": "r1"})
        while (message := json.loads(await socket.receive_str()))["type"] == "Speak":
            self.written.append(message["text"])
        assert message == {"type": "Flush"}
        await self._speak(socket)
        await socket.close()
        return socket


async def one(server: Server, folder: Path, *, interrupt_s: float | None = None) -> Trace:
    (request,) = schedule("".join(WORDS))
    live = {"options": {"voice": "sol"}, "transport": Transport.LIVE, "words_per_s": 200}
    async with serving(server.answer, "/v2/speak", "GET", **live) as target:
        runner = Runner(target, [replace(request, interrupt_s=interrupt_s)], folder=TraceFolder(folder))
        assert await runner.run()
    return runner.traces[0]


async def test_a_text_is_written_word_by_word_and_times_count_from_the_first(tmp_path: Path) -> None:
    async def speak(socket: web.WebSocketResponse) -> None:
        await send(socket, LOUD, END)

    server = Server(speak)
    trace = await one(server, tmp_path)
    assert (server.written, server.query["model"]) == (WORDS, "flux-sol-en")
    assert (trace.failure, trace.request_id, trace.audio_s) == (None, "r1", 0.1)
    assert trace.first_word_s is not None
    assert trace.first_byte_s is not None
    assert trace.ttfb_s == pytest.approx(trace.first_byte_s - trace.first_word_s)
    assert trace.ttfb_s >= 3 / 200, "the server waited for the last word"
    assert trace.silence_s is None


async def test_an_interruption_is_sent_where_it_was_planned_and_what_still_comes_is_heard(tmp_path: Path) -> None:
    told: list[dict[str, object]] = []

    async def speak(socket: web.WebSocketResponse) -> None:
        await send(socket, LOUD, LOUD, LOUD)
        told.append(json.loads(await socket.receive_str()))
        await send(socket, {"type": "SpeechInterrupted"}, LOUD)  # which it must not
        await socket.receive()

    trace = await one(Server(speak), tmp_path, interrupt_s=0.05)
    assert told == [{"type": "Interrupt", "playback_offset": {"type": "time_ms", "value": 50}}]
    assert (trace.failure, len(trace.chunks)) == (None, 4)
    assert trace.interrupted_s is not None
    assert trace.silence_s == pytest.approx(trace.chunks[-1][0] - trace.interrupted_s)
    summary = summarize([trace], planned=1)
    assert summary.silence_s is not None
    assert summary.silence_s.max == trace.silence_s


async def test_silence_at_once_is_none_at_all(tmp_path: Path) -> None:
    async def speak(socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(LOUD)
        await socket.receive_str()
        await socket.send_json({"type": "SpeechInterrupted"})
        await socket.receive()

    assert (await one(Server(speak), tmp_path, interrupt_s=0.05)).silence_s == 0.0


@pytest.mark.parametrize(("messages", "failure"), [
    ([{"type": "Error", "code": "rate_limit_exceeded", "description": "full"}], Failure.REFUSED),
    ([{"type": "Error", "code": "engine_error", "description": "lost"}], Failure.HTTP),
    ([LOUD, {"type": "Error", "code": "engine_error", "description": "lost"}], Failure.BROKEN_BODY),
    ([END], Failure.NOT_AUDIO), ([LOUD], Failure.BROKEN_BODY),
])  # fmt: skip
async def test_every_end_has_its_name(messages: list[object], failure: Failure, tmp_path: Path) -> None:
    async def speak(socket: web.WebSocketResponse) -> None:
        await send(socket, *messages)

    assert (await one(Server(speak), tmp_path)).failure is failure


def test_a_share_of_the_turns_is_interrupted_and_the_seed_settles_which() -> None:
    requests = [ScheduledRequest(index, index / 10, "Hi.") for index in range(1000)]
    planned = interrupt(requests, 0.3, seed=1)
    assert planned == interrupt(requests, 0.3, seed=1)
    places_s = [request.interrupt_s for request in planned if request.interrupt_s is not None]
    assert 250 < len(places_s) < 350
    assert len(set(places_s)) == len(places_s)
    assert interrupt(requests, 0.0, seed=1) == requests


def test_only_live_turns_are_interrupted() -> None:
    settings = Settings("http://x", warmup=3, interrupted=1.0)
    assert {request.interrupt_s for request in settings.warmup_schedule()} == {None}
    live = replace(settings, transport=Transport.LIVE)
    assert None not in {request.interrupt_s for request in live.warmup_schedule()}
