"""The protocol of a WebSocket by itself, on a transport that a test reads and stops."""

import asyncio
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from serve_app.api import bounded_websocket
from serve_app.api.access.callers import FairShare
from serve_app.api.bounded_websocket import BoundedWebSocket
from serve_app.api.early_status import EarlyStatusProtocol
from serve_app.api.parsing import uploads

pytestmark = pytest.mark.anyio

MIB = 1 << 20
_READ_BYTES = 64 << 10  # at once
_UNREAD_S = 600.0  # as docs/reliability.md has it


class Transport(asyncio.Transport):
    """What was written, and whether the connection has been ended."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = self.is_aborted = False
        self.unread = 0  # bytes that the client has not taken
        self.is_reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


Call = tuple[float, Callable[..., object], tuple[object, ...]]


class Loop:
    """The running loop with a clock of its own: what is to be called later is called when a test lets time pass."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[Call] = []

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio.get_running_loop(), name)

    def time(self) -> float:
        return self.now_s

    monotonic = time  # in place of the module

    def call_later(self, delay_s: float, call: Callable[..., object], *args: object) -> "Timer":
        timer = (self.now_s + delay_s, call, args)
        self._timers.append(timer)
        return Timer(self._timers, timer)

    def pass_s(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while due := [timer for timer in self._timers if timer[0] <= until_s]:
            timer = min(due, key=lambda each: each[0])
            self._timers.remove(timer)
            self.now_s = timer[0]
            timer[1](*timer[2])
        self.now_s = until_s


class Timer:
    def __init__(self, timers: list[Call], timer: Call) -> None:
        self._timers, self._timer = timers, timer

    def cancel(self) -> None:
        self._timers[:] = [each for each in self._timers if each is not self._timer]


class Client:
    """A client of a server that accepts whoever comes, and says nothing."""

    def __init__(self, loop: Loop, *, address: str = "10.0.0.1", trusted_proxies: int = 1) -> None:
        self.transport, self.accepted, self.closed = Transport(), asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await send({"type": "websocket.accept"})
            self.accepted.set()
            while (await receive())["type"] != "websocket.disconnect":
                pass
            self.closed.set()

        config = Config(app, ws_ping_timeout=None, ws_per_message_deflate=False, lifespan="off")
        own_loop = cast("asyncio.AbstractEventLoop", loop)
        self.protocol = BoundedWebSocket(config, ServerState(), {}, _loop=own_loop, trusted_proxies=trusted_proxies)
        self.protocol.connection_made(self.transport)
        self._client, self._address = ClientProtocol(parse_uri("ws://talkray/"), max_size=None), address

    async def connect(self, *, unread: int = 0) -> "Client":
        request = self._client.connect()
        request.headers["x-forwarded-for"] = (
            f"6.6.6.6, {self._address}"  # in lower case, as EarlyStatusProtocol passes it on
        )
        self._client.send_request(request)
        self._send()
        await self.accepted.wait()
        self.received()
        self.transport.unread = unread
        return self

    def begin(self, num_bytes: int) -> None:
        """A message that has no end yet."""
        self._client.send_text(b" " * num_bytes, fin=False)
        self._send()

    def go_on(self, num_bytes: int) -> None:
        self._client.send_continuation(b" " * num_bytes, fin=False)
        self._send()

    def ping(self, payload: bytes) -> None:
        self._client.send_ping(payload)
        self._send()

    def pings(self, count: int) -> bytes:
        """So many, as they come over the network."""
        for _ in range(count):
            self._client.send_ping(b"x" * 125)
        return b"".join(self._client.data_to_send())

    def received(self) -> list[Frame]:
        """Frames that the server has sent since the last time."""
        self._client.receive_data(bytes(self.transport.written))
        self.transport.written.clear()
        return [event for event in self._client.events_received() if isinstance(event, Frame)]

    @property
    def close_code(self) -> int | None:
        """With which the server has closed it."""
        closing = [frame for frame in self.received() if frame.opcode is Opcode.CLOSE]
        return int.from_bytes(closing[0].data[:2]) if closing else None

    def _send(self) -> None:
        data = b"".join(self._client.data_to_send())
        for start in range(0, len(data), _READ_BYTES):
            self.protocol.data_received(data[start : start + _READ_BYTES])


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(uploads, "time", loop)
    return loop


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(BoundedWebSocket, "_room", FairShare(6 * MIB))
    monkeypatch.setattr(BoundedWebSocket, "_large", [])
    yield
    for socket in tuple(BoundedWebSocket._large):
        socket._drop_message()
    assert not BoundedWebSocket._room._held


async def test_answers_to_pings_wait_for_who_reads(loop: Loop) -> None:
    client = await Client(loop).connect()
    client.ping(b"first")
    assert [frame.data for frame in client.received()] == [b"first"]
    client.protocol.pause_writing()
    for number in range(1000):
        client.ping(b"%d" % number)
    assert client.received() == []
    client.protocol.resume_writing()
    assert [frame.data for frame in client.received()] == [b"999"]


async def test_a_flood_leaves_the_event_loop_to_others(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await Client(loop).connect()
    read = BoundedWebSocket._read_piece

    def slowly(self: BoundedWebSocket, piece: bytes) -> None:
        read(self, piece)
        loop.now_s += 0.003

    monkeypatch.setattr(BoundedWebSocket, "_read_piece", slowly)
    pings = client.pings(1000)  # 130 KB
    client.protocol.data_received(pings)
    answered = len(client.received())
    assert 0 < answered < 300
    assert not client.transport.is_reading
    other = await Client(loop).connect()
    assert len(other.received()) == 0
    loop.pass_s(0.02)  # four fifths of the time are left to others
    assert len(client.received()) == 0
    loop.pass_s(0.2)
    assert answered + len(client.received()) == 1000
    assert client.transport.is_reading


async def test_what_comes_behind_a_failure_is_not_kept(loop: Loop) -> None:
    client = await Client(loop).connect()
    client.begin(4 * MIB)
    assert client.close_code == 1013
    client.protocol.data_received(b"x" * MIB)
    assert len(client.protocol._unread) == 0


async def test_one_address_leaves_room_for_the_messages_of_others(loop: Loop) -> None:
    hogs = [await Client(loop).connect() for _ in range(3)]
    for client in hogs:
        client.begin(2 * MIB - 100)
    assert [client.close_code for client in hogs] == [None, 1013, 1013]
    other = await Client(loop, address="10.0.0.2").connect()
    other.begin(2 * MIB - 100)
    assert other.close_code is None


@pytest.mark.parametrize(
    ("trusted_proxies", "first", "second", "has_room"),
    [
        (2, "10.0.0.1, 10.9.9.9", "10.0.0.2, 10.9.9.9", True),  # two clients of one load balancer
        (2, "10.0.0.1, 10.9.9.8", "10.0.0.1, 10.9.9.9", False),  # one client of two
        (1, "10.0.0.1, 10.9.9.9", "10.0.0.2, 10.9.9.9", False),
        (0, "10.0.0.1", "10.0.0.2", False),
        (1, "2001:db8::1", "2001:db8::2", False),  # one client has a /64
        (1, "2001:db8:0:1::1", "2001:db8:0:2::1", True),
    ],
)
async def test_clients_are_distinct(trusted_proxies: int, first: str, second: str, has_room: bool, loop: Loop) -> None:
    one, other = (Client(loop, address=address, trusted_proxies=trusted_proxies) for address in (first, second))
    for client in (one, other):
        (await client.connect()).begin(2 * MIB - 100)
    assert (one.close_code, other.close_code) == (None, None if has_room else 1013)


async def test_a_message_that_stalls_leaves_its_room(loop: Loop) -> None:
    slow, steady = [await Client(loop, address=f"10.0.0.{number}").connect() for number in (1, 2)]
    slow.begin(3 * MIB // 2 - 100_000)
    steady.begin(3 * MIB // 2 - 400_000)
    for _ in range(3):
        loop.pass_s(uploads._STALL_S / 2 + 0.1)
        slow.go_on(10)
        steady.go_on(uploads._LEAST_BYTES)
    late = await Client(loop, address="10.0.0.3").connect()
    late.begin(2 * MIB)
    assert (slow.close_code, steady.close_code, late.close_code) == (1013, None, None)
    later = await Client(loop, address="10.0.0.4").connect()
    later.begin(2 * MIB)
    assert (steady.close_code, later.close_code) == (None, 1013), "what comes steadily has not stalled"


async def test_one_that_comes_is_not_ended_for_another(loop: Loop) -> None:
    first, second = [await Client(loop, address=f"10.0.0.{number}").connect() for number in (1, 2)]
    first.begin(5 * MIB // 2)
    second.begin(5 * MIB // 2)
    assert (first.close_code, second.close_code) == (None, 1013)
    assert bounded_websocket.MAX_LARGE_BYTES == 48 * MIB


async def test_who_takes_nothing_for_ten_minutes_is_gone_and_who_takes_little_is_not(loop: Loop) -> None:
    client = await Client(loop).connect(unread=65536)
    for _ in range(3):
        client.protocol.pause_writing()
        loop.pass_s(_UNREAD_S - 1)
        client.protocol.resume_writing()
    loop.pass_s(10 * _UNREAD_S)
    assert not client.transport.is_aborted, "it reads again"
    client.protocol.pause_writing()
    for _ in range(3):
        loop.pass_s(_UNREAD_S - 1)
        client.transport.unread -= 1
        assert not client.transport.is_aborted
    loop.pass_s(2 * _UNREAD_S)
    assert client.transport.is_aborted


async def test_a_paused_client_owes_no_answer_to_a_ping(loop: Loop) -> None:
    """uvicorn would close with 1011 a client that reads nothing for 40 s."""
    client = await Client(loop).connect()
    loop.pass_s(21.0)
    assert [frame.opcode for frame in client.received()] == [Opcode.PING]  # which is never answered
    client.transport.unread = 65536
    client.protocol.pause_writing()
    loop.pass_s(300.0)
    assert client.received() == []
    client.protocol.resume_writing()
    loop.pass_s(60.0)
    assert {frame.opcode for frame in client.received()} == {Opcode.PING}
    assert not client.transport.is_closed


async def test_over_http_too(loop: Loop) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    transport = Transport()
    http = EarlyStatusProtocol(Config(app, lifespan="off"), ServerState(), {}, cast("asyncio.AbstractEventLoop", loop))
    http.connection_made(transport)
    transport.unread = 65536
    http.pause_writing()
    loop.pass_s(_UNREAD_S - 1)
    http.resume_writing()
    http.pause_writing()
    loop.pass_s(_UNREAD_S - 1)
    assert not transport.is_aborted
    loop.pass_s(2)
    assert transport.is_aborted
