"""The client's side of one WebSocket of a dialect, driven by hand."""

import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from fastapi import FastAPI

from serve_app.config import AccessSettings, ApiSettings
from serve_app.extensions import BUILT_IN
from serve_app.extensions.live.live_text import LiveTexts
from serve_app.extensions.voices.settings import VoiceSettings
from tests.serve_app import asgi
from tests.serve_app.fake import FakeSynthesizer
from tests.serve_app.one_model import one_api
from tools.suites.rows import DIALECTS

Json = dict[str, Any]
SPEAK: Json = {"type": "speak", "input": "Hello", "voice": "alloy"}
AUDIO_FIELDS = {dialect.sample.audio_field for dialect in DIALECTS if dialect.sample is not None} - {""}


@asynccontextmanager
async def connect(
    synthesizer: FakeSynthesizer,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    settings: ApiSettings | None = None,
    subprotocols: Sequence[str] = (),
) -> AsyncIterator[asgi.Connection]:
    texts = LiveTexts()
    api = one_api(synthesizer, settings or ApiSettings(), opened={"live": texts})
    named = {"x-request-id": "conn", **(headers or {})}
    try:
        async with asgi.websocket(api, path, headers=named, subprotocols=subprotocols) as connection:
            yield connection
    finally:
        await texts.aclose()


class Client:
    def __init__(self, connection: asgi.Connection) -> None:
        self.connection = connection
        self.headers: dict[str, str] = {}
        self.greeting: Json = {}

    async def accepted(self) -> Self:
        message = await self.connection.next()
        assert message["type"] == "websocket.accept", message
        self.headers = {name.decode(): value.decode() for name, value in message.get("headers", ())}
        return self

    def send(self, *messages: Json) -> None:
        for message in messages:
            self.connection.receive({"type": "websocket.receive", "text": json.dumps(message)})

    def leave(self) -> None:
        self.connection.receive({"type": "websocket.disconnect", "code": 1000})

    async def next(self) -> Json | bytes:
        """A JSON message, audio, or {"closed": code}."""
        message = await self.connection.next()
        if message["type"] == "websocket.close":
            return {"closed": message["code"]}
        assert message["type"] == "websocket.send", message
        if message.get("bytes") is not None:
            audio: bytes = message["bytes"]
            return audio
        parsed: Json = json.loads(message["text"])
        return parsed

    async def until(self, **fields: object) -> tuple[list[Json], bytes]:
        """Messages up to the one with these fields, which is the last, and all audio between."""
        messages: list[Json] = []
        audio = bytearray()
        while True:
            message = await self.next()
            if isinstance(message, bytes):
                audio += message
                continue
            messages.append(message)
            if all(message.get(name) == value for name, value in fields.items()):
                return messages, bytes(audio)


def audio_in(message: Json) -> bytes:
    """The audio that a JSON message carries."""
    encoded = next((message[name] for name in AUDIO_FIELDS if isinstance(message.get(name), str)), "")
    return base64.b64decode(encoded)


@asynccontextmanager
async def talking(
    synthesizer: FakeSynthesizer, path: str, *, greeting: str | None = None, **options: Any
) -> AsyncIterator[Client]:
    """As `connect`, once the handshake was accepted and the server has sent a message of type `greeting`."""
    async with connect(synthesizer, path, **options) as connection:
        client = await Client(connection).accepted()
        if greeting is not None:
            client.greeting = (await client.until(type=greeting))[0][-1]
        yield client


async def heard(
    synthesizer: FakeSynthesizer, path: str, *messages: Json, until: Json, **options: Any
) -> tuple[list[Json], bytes]:
    """What a client that sends these messages gets, up to the message with the fields of `until`."""
    async with talking(synthesizer, path, **options) as client:
        client.send(*messages)
        return await client.until(**until)


class Socket(Client):
    """One of our own socket."""

    def send_text(self, text: str) -> None:
        self.connection.receive({"type": "websocket.receive", "text": text})

    async def event(self) -> Json:
        message = await self.next()
        assert isinstance(message, dict), "audio instead of an event"
        return message

    async def utterance(self) -> tuple[list[bytes], Json]:
        """From `started` to the message that ends it: the audio frames, and that message."""
        assert (await self.event())["type"] == "started"
        return await self.frames()

    async def frames(self) -> tuple[list[bytes], Json]:
        frames: list[bytes] = []
        while isinstance(message := await self.next(), bytes):
            frames.append(message)
        return frames, message

    async def speak(self, **fields: object) -> None:
        """All of an utterance."""
        self.send(SPEAK | fields)
        assert (await self.utterance())[1]["type"] == "done"


def code_of(message: Json) -> tuple[object, object]:
    assert message["type"] == "error"
    error = message["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"], error["param"]


def every_api(folder: Path, synthesizer: FakeSynthesizer, access: AccessSettings | None = None) -> FastAPI:
    """An API whose jobs are made here, where there are jobs: without Ray, their replica is an object."""
    access = access or AccessSettings()
    if "jobs" in BUILT_IN:
        app: FastAPI = (
            import_module("tests.serve_app.extensions.jobs.desk").Server(folder, synthesizer, access=access).api
        )
        return app
    return one_api(synthesizer, ApiSettings(access=access, voices=VoiceSettings(store=str(folder))))
