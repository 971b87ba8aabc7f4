"""A server that is to end, as uvicorn and Ray Serve end it, with its WebSockets open; and clients that leave first."""

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import pytest
import uvicorn
from ray.serve._private.constants import RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S

from serve_app.api.bounded_websocket import BoundedWebSocket
from serve_app.app import LONGEST_STREAM_S
from serve_app.config import ApiSettings
from serve_app.extensions.live import connection as sockets
from serve_app.extensions.live import contexts
from serve_app.extensions.live.live_text import LiveTexts
from serve_app.extensions.live.session import Session
from tests.serve_app.extensions.client import audio_in
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, pcm_of, utterance
from tests.serve_app.one_model import one_api
from tools.suites.row import SocketRow
from tools.suites.rows import SOCKETS, here

pytestmark = pytest.mark.anyio

Message = dict[str, Any]
WHOLE = pcm_of(utterance())
LAST_FRAMES = 2 * 2 * CUSTOM_VOICE.frame_samples  # bytes of two


ROWS = {name: row for name, row in SOCKETS.items() if row.closing.stays_open and row.is_pcm}
ANY = next(iter(ROWS.values()))


def ended(row: SocketRow) -> Callable[[Message], bool]:
    kind, value = next(iter(row.ends_with.items()))
    return lambda message: bool(message.get(kind) == value)


def halves(row: SocketRow) -> tuple[list[Message], list[Message]]:
    """The messages of a turn up to the first of its text that is spoken, and the rest."""
    if not row.split_utterance or not row.is_live:
        return row.speak("Hello there."), []
    messages = row.speak_in_parts("Hello ", "there.")
    place = next(index for index, message in enumerate(messages) if "Hello " in str(message)) + 1
    return messages[:place], messages[place:]


class Server:
    """The API behind uvicorn, whose sockets are those of an ingress replica."""

    def __init__(self, ws: str | None = None) -> None:
        """`ws`: uvicorn's name for another implementation of WebSockets."""
        self.may_go_on = asyncio.Event()
        first, *rest = utterance()
        self.synthesizer = FakeSynthesizer(script=[first, self.may_go_on, *rest])
        self.texts = LiveTexts()
        api = one_api(self.synthesizer, ApiSettings(), opened={"live": self.texts})
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        protocol: Any = ws or partial(BoundedWebSocket, trusted_proxies=1)
        config = uvicorn.Config(api, log_level="error", ws=protocol, lifespan="off")
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


class Listener:
    """`audio` is what a client has heard."""

    def __init__(self, stream: aiohttp.ClientWebSocketResponse) -> None:
        self.audio, self.stream = bytearray(), stream

    async def send(self, messages: list[Message]) -> None:
        for message in messages:
            await self.stream.send_json(message)

    async def hear(self, until: Callable[[Message], bool]) -> None:
        """Up to a message, or up to the first audio that comes."""
        while True:
            message = await self.stream.receive()
            if message.type is aiohttp.WSMsgType.BINARY:
                self.audio += message.data
                told: Message = {"type": "audio"}
            else:
                assert message.type is aiohttp.WSMsgType.TEXT, (message, self.stream.close_code, bytes(self.audio)[:9])
                told = {"type": "", **message.json()}
                self.audio += audio_in(told)
            if until(told):
                return

    async def closed(self) -> tuple[int, str]:
        while (message := await self.stream.receive()).type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            pass
        assert message.type is aiohttp.WSMsgType.CLOSE, message
        return message.data, message.extra


@asynccontextmanager
async def connected(server: Server, row: SocketRow = ANY) -> AsyncIterator[Listener]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as http, http.ws_connect(server.url + row.path) as stream:
        yield Listener(stream)


@asynccontextmanager
async def listening(server: Server, row: SocketRow = ANY) -> AsyncIterator[Listener]:
    """To the first audio of a turn, and no further."""
    async with connected(server, row) as listener:
        await listener.send(halves(row)[0])
        await listener.hear(lambda _: bool(listener.audio))
        yield listener


@pytest.mark.parametrize("name", ROWS)
async def test_a_turn_that_is_spoken_ends_before_its_socket_is_closed(name: str, server: Server) -> None:
    row = SOCKETS[name]
    async with listening(server, row) as listener:
        await server.end()
        await listener.send(halves(row)[1])
        server.may_go_on.set()
        await listener.hear(ended(row))
        assert len(listener.audio) >= len(WHOLE)  # a pause of the writer is heard as one
        assert listener.audio.endswith(WHOLE[-LAST_FRAMES:])
        assert server.synthesizer.texts == ["Hello there."]
        assert await listener.closed() == (1012, "this server is being replaced, please reconnect")


async def test_a_socket_on_which_nothing_is_said_is_closed_at_once(server: Server) -> None:
    async with connected(server) as listener:
        await server.end()
        assert await listener.closed() == (1012, "this server is being replaced, please reconnect")


async def test_a_socket_that_came_through_serves_own_proxy_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """No uvicorn of ours tells it that the replica is to end."""
    monkeypatch.setattr(sockets, "_QUIET_S", 0.1)
    is_stopping = asyncio.Event()
    monkeypatch.setattr(sockets, "wait_until_stopping", is_stopping.wait)
    server, row = Server("auto"), ANY
    server.may_go_on.set()
    async with connected(server, row) as listener:
        await listener.send(row.speak("Hello there."))
        await listener.hear(lambda _: bool(listener.audio))
        is_stopping.set()
        await listener.hear(ended(row))
        assert listener.audio.endswith(WHOLE[-LAST_FRAMES:])
        assert (await listener.closed())[0] == 1012
    await server.end()
    await server.ended()


@pytest.mark.parametrize("name", here("elevenlabs"))
async def test_an_open_context_may_be_silent(name: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "_CONTEXT_QUIET_S", 30.0)
    row = SOCKETS[name]
    server.may_go_on.set()
    async with connected(server, row) as listener:
        await listener.send([{"text": "Hello.", "flush": True, "context_id": "one"}])
        await listener.hear(lambda _: len(listener.audio) == len(WHOLE))
        await server.end()
        with pytest.raises(TimeoutError):
            await listener.stream.receive(timeout=0.5)  # five times as long as a socket without a context may be quiet
        await listener.send([{"text": "There.", "flush": True, "context_id": "one"}])
        await listener.hear(lambda _: len(listener.audio) == 2 * len(WHOLE))
        await listener.send([{"text": "", "flush": True, "context_id": "one"}])
        await listener.send([{"close_context": True, "context_id": "one"}])
        await listener.hear(ended(row))
        assert (await listener.closed())[0] == 1012


@pytest.mark.parametrize("name", here("native"))
async def test_a_busy_socket_closes_between_turns(name: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_QUIET_S", 30.0)
    monkeypatch.setattr(sockets, "_PATIENCE_S", 0.0)
    row = SOCKETS[name]
    async with listening(server, row) as listener:
        await server.end()
        server.may_go_on.set()
        await listener.hear(ended(row))
        assert bytes(listener.audio) == WHOLE
        assert (await listener.closed())[0] == 1012


async def test_the_time_of_an_ending_replica_bounds_its_turns(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S + sockets.MAX_LEAVING_S < LONGEST_STREAM_S
    monkeypatch.setattr(sockets, "MAX_LEAVING_S", 0.0)
    async with listening(server) as listener:
        await server.end()
        assert (await listener.closed())[0] == 1012


async def test_a_handshake_that_meets_the_end_is_answered(server: Server) -> None:
    """Its socket is open, and idle."""
    describe, asked, may_answer = server.synthesizer.describe, asyncio.Event(), asyncio.Event()

    async def slowly() -> Any:
        asked.set()
        await may_answer.wait()
        return await describe()

    server.synthesizer.describe = slowly  # type: ignore[method-assign]
    async with AsyncExitStack() as stack:
        connecting = asyncio.create_task(stack.enter_async_context(connected(server)))
        await asked.wait()
        await server.end()
        may_answer.set()
        assert (await (await connecting).closed())[0] == 1012


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
async def test_nothing_is_kept_of_lost_clients(row: SocketRow, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle of references would keep all that it sent until the collector comes, which is minutes."""
    num_made, gone, loop = 0, asyncio.Queue[None](), asyncio.get_running_loop()

    def noted(make: Callable[..., None]) -> Callable[..., None]:
        def init(each: object, *args: Any, **options: Any) -> None:
            nonlocal num_made
            make(each, *args, **options)
            num_made += 1
            weakref.finalize(each, loop.call_soon_threadsafe, gone.put_nowait, None)

        return init

    for kind in (sockets.Connection, Session):
        monkeypatch.setattr(kind, "__init__", noted(kind.__init__))
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):  # the loop's last handle, and so its last task, is kept until the next one
            async with listening(server, row):
                pass
        assert num_made > 1
        async with asyncio.timeout(120):
            for _ in range(num_made):
                await gone.get()
    finally:
        gc.enable()
