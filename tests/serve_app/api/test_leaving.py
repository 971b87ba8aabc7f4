"""A server that is to end, as uvicorn and Ray Serve end it: with its WebSockets open."""

import asyncio
import base64
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import aiohttp
import pytest
import uvicorn
from ray.serve._private.constants import RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S

from serve_app.api import sockets
from serve_app.api.bounded_websocket import BoundedWebSocket
from serve_app.api.routes import create_api
from serve_app.app import LONGEST_STREAM_S
from serve_app.config import ApiSettings
from serve_app.speech.live_text import LiveTexts
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, pcm_of, utterance

pytestmark = pytest.mark.anyio

Message = dict[str, Any]
WHOLE = pcm_of(utterance())
LAST_FRAMES = 2 * 2 * CUSTOM_VOICE.frame_samples  # bytes of two


class Dialect(NamedTuple):
    """How one turn is asked for, and what its answers mean."""

    path: str
    before: list[Message]  # its text so far
    after: list[Message]  # the rest, which is written while the server ends
    is_end: Callable[[Message], bool]
    audio: Callable[[Message], str | None] = lambda message: None  # in base64; else it comes as bytes
    opening: Callable[[Message], bool] | None = None  # what is told before anything is asked


REALTIME_ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello there."}]}
DIALECTS = {
    "native": Dialect(
        "/v1/audio/speech/ws",
        [{"type": "speak", "input": "Hello there.", "voice": "ryan"}],
        [],
        lambda message: message["type"] == "done",
    ),
    "deepgram": Dialect(
        "/v1/speak?encoding=linear16&sample_rate=24000",
        [{"type": "Speak", "text": "Hello "}],
        [{"type": "Speak", "text": "there."}, {"type": "Flush"}],
        lambda message: message["type"] == "Flushed",
    ),
    "flux": Dialect(
        "/v2/speak?model=flux-x-en&encoding=linear16&sample_rate=24000",
        [{"type": "Speak", "text": "Hello "}],
        [{"type": "Speak", "text": "there."}, {"type": "Flush"}],
        lambda message: message["type"] == "SpeechMetadata",
    ),
    "elevenlabs": Dialect(
        "/v1/text-to-speech/x/multi-stream-input?output_format=pcm_24000",
        [{"text": "Hello ", "context_id": "one"}],
        [
            {"text": "there.", "context_id": "one"},
            {"text": "", "flush": True, "context_id": "one"},
            {"close_context": True, "context_id": "one"},
        ],
        lambda message: bool(message.get("isFinal")),
        lambda message: message.get("audio"),
    ),
    "realtime": Dialect(
        "/v1/realtime?model=gpt-realtime",
        [{"type": "conversation.item.create", "item": REALTIME_ITEM}, {"type": "response.create"}],
        [],
        lambda message: message["type"] == "response.done",
        lambda message: message["delta"] if message["type"] == "response.output_audio.delta" else None,
    ),
}


class Server:
    """The API behind uvicorn, whose sockets are those of an ingress replica."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()
        first, *rest = utterance()
        self.synthesizer = FakeSynthesizer(script=[first, self.may_go_on, *rest])
        self.texts = LiveTexts()
        api = create_api(self.synthesizer, ApiSettings(), live_texts=self.texts)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        config = uvicorn.Config(api, log_level="error", ws=BoundedWebSocket, lifespan="off")
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve([self._listening]))

    async def end(self) -> None:
        """Begin to: it takes no connection any more, and its sockets have been told."""
        self._server.should_exit = True
        while not all(  # noqa: ASYNC110
            each._is_leaving for each in self._server.server_state.connections if isinstance(each, BoundedWebSocket)
        ):
            await asyncio.sleep(0.01)

    async def ended(self) -> None:
        await self._serving
        await self.texts.aclose()


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(sockets, "_QUIET_S", 0.1)
    server = Server()
    yield server
    await server.end()
    async with asyncio.timeout(30):
        await server.ended()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


class Listener:
    """A client of one dialect: `audio` is what it has heard."""

    def __init__(self, dialect: Dialect, stream: aiohttp.ClientWebSocketResponse) -> None:
        self.audio, self._dialect, self._stream = bytearray(), dialect, stream

    async def send(self, messages: list[Message]) -> None:
        for message in messages:
            await self._stream.send_json(message)

    async def hear(self, until: Callable[[Message], bool]) -> None:
        """Up to a message, or up to the first audio that comes."""
        while True:
            message = await self._stream.receive()
            if message.type is aiohttp.WSMsgType.BINARY:
                self.audio += message.data
                told: Message = {"type": "audio"}
            else:
                assert message.type is aiohttp.WSMsgType.TEXT, (message, self._stream.close_code, bytes(self.audio)[:9])
                told = {"type": "", **message.json()}
                self.audio += base64.b64decode(self._dialect.audio(told) or "")
            if until(told):
                return

    async def closed(self) -> tuple[int, str]:
        while (message := await self._stream.receive()).type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            pass
        assert message.type is aiohttp.WSMsgType.CLOSE, message
        return message.data, message.extra


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_turn_that_is_spoken_ends_before_its_socket_is_closed(
    name: str, server: Server, http: aiohttp.ClientSession
) -> None:
    dialect = DIALECTS[name]
    async with http.ws_connect(server.url + dialect.path) as stream:
        listener = Listener(dialect, stream)
        await listener.send(dialect.before)
        await listener.hear(lambda _: bool(listener.audio))
        await server.end()
        await listener.send(dialect.after)
        server.may_go_on.set()
        await listener.hear(dialect.is_end)
        assert len(listener.audio) >= len(WHOLE)  # a pause of the writer is heard as one
        assert listener.audio.endswith(WHOLE[-LAST_FRAMES:])
        assert server.synthesizer.texts == ["Hello there."]
        assert await listener.closed() == (1012, "this server is being replaced: connect again")


async def test_a_socket_on_which_nothing_is_said_is_closed_at_once(server: Server, http: aiohttp.ClientSession) -> None:
    async with http.ws_connect(server.url + DIALECTS["flux"].path) as stream:
        await server.end()
        listener = Listener(DIALECTS["flux"], stream)
        assert await listener.closed() == (1012, "this server is being replaced: connect again")


async def test_an_open_context_may_be_silent_between_two_sentences(
    server: Server, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_CONTEXT_QUIET_S", 30.0)
    dialect = DIALECTS["elevenlabs"]
    server.may_go_on.set()
    async with http.ws_connect(server.url + dialect.path) as stream:
        listener = Listener(dialect, stream)
        await listener.send([{"text": "Hello.", "flush": True, "context_id": "one"}])
        await listener.hear(lambda _: len(listener.audio) == len(WHOLE))
        await server.end()
        with pytest.raises(TimeoutError):
            await stream.receive(timeout=0.5)  # five times as long as a socket without a context may be quiet
        await listener.send([{"text": "There.", "flush": True, "context_id": "one"}])
        await listener.hear(lambda _: len(listener.audio) == 2 * len(WHOLE))
        await listener.send([{"text": "", "flush": True, "context_id": "one"}])
        await listener.send([{"close_context": True, "context_id": "one"}])
        await listener.hear(dialect.is_end)
        assert (await listener.closed())[0] == 1012


async def test_a_socket_that_is_never_quiet_is_closed_between_two_turns(
    server: Server, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_QUIET_S", 30.0)
    monkeypatch.setattr(sockets, "_PATIENCE_S", 0.0)
    dialect = DIALECTS["native"]
    async with http.ws_connect(server.url + dialect.path) as stream:
        listener = Listener(dialect, stream)
        await listener.send(dialect.before)
        await listener.hear(lambda _: bool(listener.audio))
        await server.end()
        server.may_go_on.set()
        await listener.hear(dialect.is_end)
        assert bytes(listener.audio) == WHOLE
        assert (await listener.closed())[0] == 1012


async def test_the_time_of_a_replica_that_ends_bounds_its_turns(
    server: Server, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S + sockets.MAX_LEAVING_S < LONGEST_STREAM_S
    monkeypatch.setattr(sockets, "MAX_LEAVING_S", 0.0)
    dialect = DIALECTS["deepgram"]
    async with http.ws_connect(server.url + dialect.path) as stream:
        listener = Listener(dialect, stream)
        await listener.send(dialect.before)
        await listener.hear(lambda _: bool(listener.audio))
        await server.end()
        assert (await listener.closed())[0] == 1012


async def test_a_handshake_that_meets_the_end_is_answered(server: Server, http: aiohttp.ClientSession) -> None:
    """Its socket is open, and idle."""
    describe, asked, may_answer = server.synthesizer.describe, asyncio.Event(), asyncio.Event()

    async def slowly() -> Any:
        asked.set()
        await may_answer.wait()
        return await describe()

    server.synthesizer.describe = slowly  # type: ignore[method-assign]
    dialect = DIALECTS["flux"]
    connecting = asyncio.create_task(http.ws_connect(server.url + dialect.path).__aenter__())
    await asked.wait()
    await server.end()
    may_answer.set()
    async with await connecting as stream:
        assert (await Listener(dialect, stream).closed())[0] == 1012
