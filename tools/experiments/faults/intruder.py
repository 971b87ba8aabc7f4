"""One hostile client: its connections over HTTP, WebSockets and bare sockets, and what an act may take."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from tools.suites.raw import handshake, request

HELD_S = 12.0  # that a connection is held
PAUSE_S = 45.0  # for which a client that means well reads nothing; a WebSocket was closed with 1011 after 40
FILL_S = 10.0  # within which intruders take every place
FREED_S = 25.0  # after which a reader that reads nothing holds no place
OTHERS_S = 5.0  # within which another client's recording is taken in
CUT_S = 2.0  # that an act may take to end once its time is over
PER_MINUTE = 300  # requests that the server lets an address make
STREAMS = 16  # that the server speaks at once
SHORT = {"input": "Hello.", "voice": "alloy", "response_format": "pcm", "max_new_tokens": 2}
ENDLESS = {**SHORT, "input": "I will not stop.", "ignore_eos": True, "max_new_tokens": 900}
LOUD = {**ENDLESS, "response_format": "pcm_f32le", "sample_rate": 48000, "speed": 0.25}  # 60 KB a frame
KIB, MIB = 1 << 10, 1 << 20
FLUX = "/v2/speak?model=flux-ryan-en&encoding=linear16&sample_rate=24000"
CONTEXTS = "/v1/text-to-speech/ryan/multi-stream-input?output_format=pcm_24000"
DASHSCOPE = "/api-ws/v1/realtime"

Json = dict[str, Any]


class Broken(Exception):
    """A limit did not hold; the message says which."""


@dataclass(frozen=True, slots=True)
class Intruder:
    """One that means no good: a valid key, and an address of its own. `polite_key` is that of another client."""

    port: int
    key: str
    address: str
    polite_key: str = ""

    @property
    def polite(self) -> "Intruder":
        """A client that means well, to whom something may happen."""
        return replace(self, key=self.polite_key, address="127.0.0.199")

    @property
    def headers(self) -> dict[str, str]:
        """Key and address; a server that trusts one proxy does not believe the latter."""
        return {"Authorization": f"Bearer {self.key}", "X-Forwarded-For": self.address}

    @contextlib.asynccontextmanager
    async def http(self, *, buffer: int | None = None) -> AsyncIterator[aiohttp.ClientSession]:
        """With `buffer` its connections take in so many bytes that it has not read, and a little more."""
        made = (lambda info: _small(buffer, info[0])) if buffer else None
        connector = aiohttp.TCPConnector(local_addr=(self.address, 0), socket_factory=made)
        url, timeout = f"http://127.0.0.1:{self.port}", aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(url, connector=connector, timeout=timeout, headers=self.headers) as http:
            yield http

    async def post(self, path: str, body: Json | bytes, **headers: str) -> str:
        """The status; the body of the answer is read and dropped."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **headers}
        async with self.http() as http, http.post(path, data=data, headers=sent) as answer:
            async for _ in answer.content.iter_any():
                pass
            return str(answer.status)

    @contextlib.asynccontextmanager
    async def talking(
        self, path: str, *, protocols: Iterable[str] = (), buffer: int | None = None
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket; who leaves it does not wait for the server."""
        async with self.http(buffer=buffer) as http:
            timeout = aiohttp.ClientWSTimeout(ws_close=0.5)
            async with http.ws_connect(path, protocols=tuple(protocols), timeout=timeout, max_msg_size=0) as talking:
                yield talking

    async def say(
        self, path: str, messages: Iterable[str | Json], *, reads_s: float = 0.5, protocols: Iterable[str] = ()
    ) -> str:
        """Sends messages, reads until nothing comes for so long, and leaves."""
        async with self.talking(path, protocols=protocols) as talking:
            for message in messages:
                await talking.send_str(message if isinstance(message, str) else json.dumps(message))
            return await rest(talking, reads_s)

    @contextlib.asynccontextmanager
    async def raw(self) -> AsyncIterator[socket.socket]:
        """A bare connection, whose answers nobody reads until it is asked to."""
        loop = asyncio.get_running_loop()
        with _small(4096) as raw:
            raw.bind((self.address, 0))
            await loop.sock_connect(raw, ("127.0.0.1", self.port))
            yield raw

    def request(self, body: bytes, *, announced: int | None = None) -> bytes:
        return request(body, self.headers, announced=announced)


def _small(buffer: int, family: int = socket.AF_INET) -> socket.socket:
    """A socket that takes in little of what nobody reads."""
    raw = socket.socket(family)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    raw.setblocking(False)
    return raw


async def status_of(http: aiohttp.ClientSession, path: str) -> str:
    """Of a GET, whose answer is read and dropped."""
    async with http.get(path) as answer:
        async for _ in answer.content.iter_any():
            pass
        return str(answer.status)


async def rest(talking: aiohttp.ClientWebSocketResponse, within_s: float) -> str:
    """How a WebSocket goes on: "open" where nothing comes for so long, else how it was closed."""
    try:
        while True:
            message = await talking.receive(within_s)
            if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                return f"closed {talking.close_code}"
    except TimeoutError:
        return "open"


async def first_line(raw: socket.socket, within_s: float = HELD_S) -> str:
    """The status of the answer on a bare connection, of which all is read."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(within_s):
            while data := await asyncio.get_running_loop().sock_recv(raw, 65536):
                answer = answer or data
    words = answer.partition(b"\r\n")[0].split(b" ")
    return words[1].decode(errors="replace") if len(words) > 1 and answer.startswith(b"HTTP/") else "no answer"


async def sent(raw: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(raw, data)


async def upgrade(raw: socket.socket, key: str) -> None:
    """Makes a bare connection a WebSocket of the native path."""
    await sent(raw, handshake(key))
    async with asyncio.timeout(HELD_S):
        while b"\r\n\r\n" not in (data := await asyncio.get_running_loop().sock_recv(raw, 4096)):
            if not data:
                raise EOFError
