"""What happens when, on a connection driven by hand."""

import asyncio
import json
from itertools import product

import pytest
from fastapi import FastAPI
from starlette.types import Message

from deployments.errors import Overloaded, TalkerLost
from serve_app.api.parsing import client_input
from serve_app.config import ApiSettings
from tests.serve_app import asgi
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, Step, chunk, tone, utterance
from tests.serve_app.one_model import one_api

pytestmark = pytest.mark.anyio

BODY = {"model": "tts-1", "input": "Hello", "voice": "alloy", "response_format": "pcm"}
FRAME = tone(CUSTOM_VOICE.frame_samples)
DISCONNECT: Message = {"type": "http.disconnect"}


def speech(synthesizer: FakeSynthesizer, **fields: object) -> asgi.Connection:
    api = one_api(synthesizer, ApiSettings())
    return asgi.http(api, "POST", "/v1/audio/speech", body=BODY | fields)


async def test_audio_is_sent_while_more_is_being_made() -> None:
    more = asyncio.Event()
    synthesizer = FakeSynthesizer(script=[chunk(FRAME), more, chunk(FRAME)])
    async with speech(synthesizer) as connection:
        assert (await connection.next())["type"] == "http.response.start"
        first = await connection.next()
        assert (first["body"], first["more_body"]) == (FRAME, True)
        await synthesizer.waiting.wait()
        assert not synthesizer.closed.is_set()
        more.set()
        assert (await connection.next())["body"] == FRAME
        assert await connection.next() == {"type": "http.response.body", "body": b"", "more_body": False}
        await connection.task


EVENTS = {"stream_format": "sse"}


@pytest.mark.parametrize(
    ("spoken", "fields"),
    [
        *product(([], [chunk(FRAME)]), ({}, EVENTS, {"stream": False}, {"response_format": "mp3"})),
        *product([utterance()], ({}, EVENTS)),
    ],
)
@pytest.mark.parametrize("who", ["client", "server"])
async def test_who_leaves_or_cancels(spoken: list[Step], fields: dict[str, object], who: str) -> None:
    """While a chunk is awaited, or while the first of them all is being sent."""
    is_whole = len(spoken) > 1
    synthesizer = FakeSynthesizer(script=spoken if is_whole else [*spoken, asyncio.Event()])
    async with speech(synthesizer, **fields) as connection:
        if not is_whole:
            await synthesizer.waiting.wait()
        else:
            connection.stall()
            await connection.sending.wait()
        assert not synthesizer.closed.is_set()
        if who == "client":
            connection.receive(DISCONNECT)
        else:
            connection.task.cancel()
        await asyncio.wait((connection.task,))
        assert connection.task.cancelled() == (who == "server")
        assert synthesizer.closed.is_set()


async def test_a_connection_that_breaks_in_send() -> None:
    more = asyncio.Event()
    synthesizer = FakeSynthesizer(script=[chunk(FRAME), more, chunk(FRAME)])
    async with speech(synthesizer) as connection:
        await synthesizer.waiting.wait()
        connection.send_error = BrokenPipeError()
        more.set()
        await connection.task
        assert synthesizer.closed.is_set()


async def test_an_error_after_audio_began_breaks_the_body_off() -> None:
    synthesizer = FakeSynthesizer(script=[chunk(FRAME), TalkerLost("gone")])
    async with speech(synthesizer) as connection:
        assert (await connection.next())["status"] == 200
        assert (await connection.next())["body"] == FRAME
        with pytest.raises(AssertionError, match="without another message"):
            await connection.next()
        assert isinstance(connection.task.exception(), RuntimeError)


async def test_an_error_after_events_began_is_the_last_event() -> None:
    synthesizer = FakeSynthesizer(script=[chunk(FRAME), Overloaded("full")])
    async with speech(synthesizer, stream_format="sse") as connection:
        assert (await connection.next())["status"] == 200
        await connection.next()
        event = json.loads((await connection.next())["body"].removeprefix(b"data: "))
        assert (event["type"], event["error"]["code"]) == ("speech.audio.error", "rate_limit_exceeded")
        with pytest.raises(AssertionError, match="without another message"):
            await connection.next()
        assert connection.task.exception() is not None


async def test_an_error_while_a_whole_body_is_made_is_a_status() -> None:
    synthesizer = FakeSynthesizer(script=[chunk(FRAME), TalkerLost("gone")])
    async with speech(synthesizer, stream=False) as connection:
        assert (await connection.next())["status"] == 503


async def test_a_client_that_leaves_before_its_body_is_complete(api: FastAPI, synthesizer: FakeSynthesizer) -> None:
    async with asgi.http(api, "POST", "/v1/audio/speech") as connection:
        connection.receive({"type": "http.request", "body": b'{"input":', "more_body": True})
        connection.receive(DISCONNECT)
        await connection.task
    assert synthesizer.requests == []


async def test_an_oversized_body_is_refused_before_its_end(api: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_input, "MAX_BODY_BYTES", 10)
    async with asgi.http(api, "POST", "/v1/audio/speech") as connection:
        connection.receive({"type": "http.request", "body": b" " * 11, "more_body": True})
        assert (await connection.next())["status"] == 413
