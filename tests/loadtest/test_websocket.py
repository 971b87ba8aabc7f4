import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtest.recording import Recording
from loadtest.runner import Runner
from loadtest.settings import Settings, Transport
from loadtest.traces import Failure, Trace, TraceFolder
from tests.loadtest.test_runner import LOUD, schedule

pytestmark = pytest.mark.anyio

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
STARTED = {"type": "started", "request_id": "r1", "sample_rate": 24000, "channels": 1}


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Settings]:
    app = web.Application()
    app.router.add_get("/v1/audio/speech/ws", handler)
    async with TestServer(app) as server:
        url = str(server.make_url("/"))
        yield Settings(
            url, options={"voice": "sol"}, timeout_s=10.0, transport=Transport.WEBSOCKET, headers={"X-Key": "k"}
        )


async def one(handler: Handler, folder: Path) -> Trace:
    async with serving(handler) as target:
        runner = Runner(target, schedule("Hi."), folder=TraceFolder(folder))
        assert await runner.run()
    return runner.traces[0]


def saying(message: str | bytes) -> Handler:
    """A server that says one thing, and stays until its client leaves."""

    async def handler(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await (socket.send_bytes(message) if isinstance(message, bytes) else socket.send_str(message))
        await socket.receive()
        return socket

    return handler


def error(code: str) -> dict[str, object]:
    return {"type": "error", "error": {"code": code, "message": "not now"}}


async def test_an_utterance_is_asked_for_and_its_audio_recorded(tmp_path: Path) -> None:
    asked: list[dict[str, object]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.headers["X-Key"] == "k"
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        asked.append(json.loads(await socket.receive_str()))
        await socket.send_json(STARTED)
        await socket.send_bytes(LOUD)
        await socket.send_bytes(LOUD)
        await socket.send_json({"type": "done"})
        await socket.close()
        return socket

    trace = await one(handler, tmp_path)
    assert asked == [{"type": "speak", "voice": "sol", "input": "Hi.", "response_format": "pcm"}]
    assert (trace.failure, trace.status, trace.request_id, trace.audio_s) == (None, 200, "r1", 0.2)
    assert len(trace.chunks) == 2


@pytest.mark.parametrize(("messages", "failure"), [
    ([error("rate_limit_exceeded")], Failure.REFUSED), ([error("engine_error")], Failure.HTTP),
    ([STARTED, LOUD, error("engine_error")], Failure.BROKEN_BODY),
    ([STARTED, {"type": "done"}], Failure.NOT_AUDIO), ([STARTED, LOUD], Failure.BROKEN_BODY),
    ([], Failure.BROKEN_BODY),
])  # fmt: skip
async def test_every_end_has_its_name(messages: list[object], failure: Failure, tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive_str()
        for message in messages:
            await (socket.send_bytes(message) if isinstance(message, bytes) else socket.send_json(message))
        await socket.close()
        return socket

    assert (await one(handler, tmp_path)).failure is failure


QUARTER = base64.b64encode(LOUD).decode()
ELEVENLABS = [{"text": " "}, {"text": "Hi."}, {"text": " "}, {"text": ""}]
DEEPGRAM = [{"type": "Speak", "text": "Hi."}, {"type": "Flush"}]
METADATA = {"type": "Metadata", "request_id": "r2"}


@pytest.mark.parametrize(("dialect", "path", "asked", "told", "failure"), [
    (
        "elevenlabs-ws",
        "/v1/text-to-speech/sol/stream-input?output_format=pcm_24000&model_id=flash",
        ELEVENLABS,
        [{"audio": QUARTER, "isFinal": None}, {"audio": QUARTER}, {"audio": None, "isFinal": True}],
        None,
    ),
    (
        "elevenlabs-ws",
        "/v1/text-to-speech/sol/stream-input?output_format=pcm_24000&model_id=flash",
        ELEVENLABS,
        [{"contextId": None, "error": "too many", "code": "rate_limit_exceeded"}],
        Failure.REFUSED,
    ),
    (
        "deepgram-ws", "/v1/speak?model=sol&encoding=linear16&sample_rate=24000", DEEPGRAM,
        [METADATA, LOUD, LOUD, {"type": "Flushed", "sequence_id": 0}], None,
    ),
    (
        "deepgram-ws", "/v1/speak?model=sol&encoding=linear16&sample_rate=24000", DEEPGRAM,
        [METADATA, LOUD, {"type": "Error", "code": "engine_error", "description": "lost"}],
        Failure.BROKEN_BODY,
    ),
])  # fmt: skip
async def test_sockets_of_other_makers(
    dialect: str, path: str, asked: list[object], told: list[object], failure: Failure | None, tmp_path: Path
) -> None:
    heard: list[object] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        assert (request.path_qs, request.headers["X-Key"]) == (path, "k")
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        heard.extend([json.loads(await socket.receive_str()) for _ in asked])
        for message in told:
            await (socket.send_bytes(message) if isinstance(message, bytes) else socket.send_json(message))
        await socket.receive()
        return socket

    app = web.Application()
    app.router.add_get(path.partition("?")[0], handler)
    async with TestServer(app) as server:
        options = {"voice": "sol", "model": "flash"}
        target = Settings(str(server.make_url("/")), dialect=dialect, options=options, headers={"X-Key": "k"})
        runner = Runner(target, schedule("Hi."), folder=TraceFolder(tmp_path))
        assert await runner.run()
    [trace] = runner.traces
    assert (heard, trace.failure) == (asked, failure)
    assert trace.audio_s == pytest.approx({None: 0.2, Failure.REFUSED: 0.0, Failure.BROKEN_BODY: 0.1}[failure])
    assert trace.request_id == ("r2" if dialect == "deepgram-ws" else None)
    if failure is Failure.REFUSED:
        assert (trace.status, trace.error) == (429, "too many")


UNREADABLE = "a message of the server cannot be read"


@pytest.mark.parametrize(("message", "error"), [
    ("<html>", UNREADABLE), ("[]", UNREADABLE), ("7", UNREADABLE), ("[" * 100_000, UNREADABLE),
    ('{"type": "started", "sample_rate": "many"}', "sample rate 'many'"),
    ('{"type": "started", "sample_rate": null}', "sample rate None"),
    (f'{{"type": "started", "sample_rate": {"9" * 4000}}}', "sample rate 9"),
])  # fmt: skip
async def test_a_message_that_cannot_be_read_fails_its_request(message: str, error: str, tmp_path: Path) -> None:
    trace = await one(saying(message), tmp_path)
    assert trace.failure is Failure.NOT_AUDIO
    assert trace.error is not None
    assert trace.error.startswith(error)


async def test_a_frame_that_no_websocket_has_is_the_failure_of_its_request(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        assert request.transport is not None
        request.transport.write(b"\xff\xff")
        await socket.receive()
        return socket

    trace = await one(handler, tmp_path)
    assert (trace.failure, (trace.error or "")[: len(UNREADABLE)]) == (Failure.NOT_AUDIO, UNREADABLE)


@pytest.mark.parametrize("audio", ["7", '"no base64!"', "[1]"])
async def test_audio_that_is_no_base64_is_the_failure_of_its_request(audio: str, tmp_path: Path) -> None:
    app = web.Application()
    app.router.add_get("/v1/text-to-speech/sol/stream-input", saying(f'{{"audio": {audio}}}'))
    async with TestServer(app) as server:
        target = Settings(str(server.make_url("/")), dialect="elevenlabs-ws", options={"voice": "sol", "model": "m"})
        runner = Runner(target, schedule("Hi."), folder=TraceFolder(tmp_path))
        assert await runner.run()
    [trace] = runner.traces
    assert trace.failure is Failure.NOT_AUDIO
    assert trace.error is not None
    assert trace.error.startswith("the audio in a message of the server is no base64")


@pytest.mark.parametrize("defect", [TypeError, ValueError, AttributeError])
async def test_a_defect_is_not_the_servers(
    defect: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(*_: object) -> None:
        raise defect("ours")

    monkeypatch.setattr(Recording, "receive", receive)
    with pytest.RaisesGroup(pytest.RaisesExc(defect, match="^ours$")):
        await one(saying(LOUD), tmp_path)


async def test_a_socket_closed_with_try_again_later_is_a_refusal(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive_str()
        await socket.close(code=1013)
        return socket

    trace = await one(handler, tmp_path)
    assert (trace.failure, trace.status) == (Failure.REFUSED, 429)


async def test_a_handshake_answered_with_429_is_a_refusal_with_its_advice(tmp_path: Path) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=429, headers={"Retry-After": "2"})

    trace = await one(handler, tmp_path)
    assert (trace.failure, trace.status, trace.retry_after_s) == (Failure.REFUSED, 429, 2.0)
