import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web

from loadtest.recording import Recording
from loadtest.settings import Transport
from loadtest.traces import Failure, Trace
from tests.loadtest.test_runner import LOUD, Handler, run, serving

pytestmark = pytest.mark.anyio

STARTED = {"type": "started", "request_id": "r1", "sample_rate": 24000, "channels": 1}


async def one(handler: Handler, folder: Path, path: str = "/v1/audio/speech/ws", **settings: Any) -> Trace:
    given = {"options": {"voice": "sol"}, "headers": {"X-Key": "k"}, "transport": Transport.WEBSOCKET, **settings}
    async with serving(handler, path, "GET", **given) as target:
        return (await run(target, folder, "Hi."))["Hi."]


async def send(socket: web.WebSocketResponse, *messages: object) -> None:
    for message in messages:
        match message:
            case bytes():
                await socket.send_bytes(message)
            case str():
                await socket.send_str(message)
            case _:
                await socket.send_json(message)


def talking(talk: Callable[[web.WebSocketResponse, web.Request], Awaitable[object]]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await talk(socket, request)
        return socket

    return handler


def saying(message: str | bytes) -> Handler:
    async def talk(socket: web.WebSocketResponse, _: web.Request) -> None:
        await send(socket, message)
        await socket.receive()

    return talking(talk)


def error(code: str) -> dict[str, object]:
    return {"type": "error", "error": {"code": code, "message": "not now"}}


async def test_an_utterance_is_asked_for_and_its_audio_recorded(tmp_path: Path) -> None:
    asked: list[dict[str, object]] = []

    async def talk(socket: web.WebSocketResponse, request: web.Request) -> None:
        assert request.headers["X-Key"] == "k"
        asked.append(json.loads(await socket.receive_str()))
        await send(socket, STARTED, LOUD, LOUD, {"type": "done"})
        await socket.close()

    trace = await one(talking(talk), tmp_path)
    assert asked == [{"type": "speak", "voice": "sol", "input": "Hi.", "response_format": "pcm"}]
    assert (trace.failure, trace.status, trace.request_id, trace.audio_s) == (None, 200, "r1", 0.2)
    assert len(trace.chunks) == 2


@pytest.mark.parametrize(("messages", "code", "failure"), [
    ([error("rate_limit_exceeded")], 1000, Failure.REFUSED), ([error("engine_error")], 1000, Failure.HTTP),
    ([STARTED, LOUD, error("engine_error")], 1000, Failure.BROKEN_BODY),
    ([STARTED, {"type": "done"}], 1000, Failure.NOT_AUDIO), ([STARTED, LOUD], 1000, Failure.BROKEN_BODY),
    ([], 1000, Failure.BROKEN_BODY), ([], 1013, Failure.REFUSED),  # try again later
])  # fmt: skip
async def test_every_end_has_its_name(messages: list[object], code: int, failure: Failure, tmp_path: Path) -> None:
    async def talk(socket: web.WebSocketResponse, _: web.Request) -> None:
        await socket.receive_str()
        await send(socket, *messages)
        await socket.close(code=code)

    trace = await one(talking(talk), tmp_path)
    assert trace.failure is failure
    assert (trace.status == 429) is (failure is Failure.REFUSED)


SOUND = base64.b64encode(LOUD).decode()
METADATA = {"type": "Metadata", "request_id": "r2"}
LOST = {"type": "Error", "code": "engine_error", "description": "lost"}
OTHERS = {  # where, and what is asked there
    "elevenlabs-ws": (
        "/v1/text-to-speech/sol/stream-input?output_format=pcm_24000&model_id=flash",
        [{"text": " "}, {"text": "Hi."}, {"text": " "}, {"text": ""}],
    ),
    "deepgram-ws": (
        "/v1/speak?model=sol&encoding=linear16&sample_rate=24000",
        [{"type": "Speak", "text": "Hi."}, {"type": "Flush"}],
    ),
}


@pytest.mark.parametrize(("dialect", "told", "failure"), [
    ("elevenlabs-ws", [{"audio": SOUND, "isFinal": None}, {"audio": SOUND}, {"audio": None, "isFinal": True}], None),
    ("elevenlabs-ws", [{"contextId": None, "error": "too many", "code": "rate_limit_exceeded"}], Failure.REFUSED),
    ("deepgram-ws", [METADATA, LOUD, LOUD, {"type": "Flushed", "sequence_id": 0}], None),
    ("deepgram-ws", [METADATA, LOUD, LOST], Failure.BROKEN_BODY),
])  # fmt: skip
async def test_sockets_of_others(dialect: str, told: list[object], failure: Failure | None, tmp_path: Path) -> None:
    path, asked = OTHERS[dialect]
    heard: list[object] = []

    async def talk(socket: web.WebSocketResponse, request: web.Request) -> None:
        assert (request.path_qs, request.headers["X-Key"]) == (path, "k")
        heard.extend([json.loads(await socket.receive_str()) for _ in asked])
        await send(socket, *told)
        await socket.receive()

    given = {"dialect": dialect, "options": {"voice": "sol", "model": "flash"}, "transport": Transport.HTTP}
    trace = await one(talking(talk), tmp_path, path.partition("?")[0], **given)
    assert (heard, trace.failure) == (asked, failure)
    assert trace.audio_s == pytest.approx({None: 0.2, Failure.REFUSED: 0.0, Failure.BROKEN_BODY: 0.1}[failure])
    assert trace.request_id == ("r2" if dialect == "deepgram-ws" else None)
    if failure is Failure.REFUSED:
        assert (trace.status, trace.error) == (429, "too many")


UNREADABLE = "a message from the server is invalid"


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
    async def talk(socket: web.WebSocketResponse, request: web.Request) -> None:
        assert request.transport is not None
        request.transport.write(b"\xff\xff")
        await socket.receive()

    trace = await one(talking(talk), tmp_path)
    assert (trace.failure, (trace.error or "")[: len(UNREADABLE)]) == (Failure.NOT_AUDIO, UNREADABLE)


@pytest.mark.parametrize("audio", ["7", '"no base64!"', "[1]"])
async def test_audio_that_is_no_base64_is_the_failure_of_its_request(audio: str, tmp_path: Path) -> None:
    given = {"dialect": "elevenlabs-ws", "options": {"voice": "sol", "model": "m"}, "transport": Transport.HTTP}
    path = "/v1/text-to-speech/sol/stream-input"
    trace = await one(saying(f'{{"audio": {audio}}}'), tmp_path, path, **given)
    assert trace.failure is Failure.NOT_AUDIO
    assert trace.error is not None
    assert trace.error.startswith("the audio in a message from the server is not valid base64")


@pytest.mark.parametrize("defect", [TypeError, ValueError, AttributeError])
async def test_a_defect_is_ours(defect: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "receive", Mock(side_effect=defect("ours")))
    with pytest.RaisesGroup(pytest.RaisesExc(defect, match="^ours$")):
        await one(saying(LOUD), tmp_path)


async def test_a_handshake_answered_with_429_is_a_refusal_with_its_advice(tmp_path: Path) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=429, headers={"Retry-After": "2"})

    trace = await one(handler, tmp_path)
    assert (trace.failure, trace.status, trace.retry_after_s) == (Failure.REFUSED, 429, 2.0)
