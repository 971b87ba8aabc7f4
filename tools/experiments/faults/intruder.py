"""One hostile client with HTTP, WebSocket and raw connections, and the limits for its attacks."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from tools.suites.raw import handshake, request

HELD_S = 12.0  # duration of a held connection
PAUSE_S = 45.0  # duration for which a well-behaved client does not read
FILL_S = 10.0  # time in which attackers occupy all capacity
FREED_S = 25.0  # time after which an idle reader's capacity is free again
OTHERS_S = 5.0  # time limit to accept another client's recording
CUT_S = 2.0  # time for an attack to end after its window
PER_MINUTE = 300  # the server's limit of requests per address
STREAMS = 16  # concurrent streams of the server
SHORT = {"input": "Hello.", "voice": "alloy", "response_format": "pcm", "max_new_tokens": 2}
ENDLESS = {**SHORT, "input": "I will not stop.", "ignore_eos": True, "max_new_tokens": 900}
LOUD = {**ENDLESS, "response_format": "pcm_f32le", "sample_rate": 48000, "speed": 0.25}  # 60 KB per frame
KIB, MIB = 1 << 10, 1 << 20
FLUX = "/v2/speak?model=flux-ryan-en&encoding=linear16&sample_rate=24000"
CONTEXTS = "/v1/text-to-speech/ryan/multi-stream-input?output_format=pcm_24000"
DASHSCOPE = "/api-ws/v1/realtime"

Json = dict[str, Any]


class Broken(Exception):
    """Error for a server limit that was not enforced. The message names the limit."""


@dataclass(frozen=True, slots=True)
class Intruder:
    """Hostile client with a valid key and its own address. `polite_key` belongs to a well-behaved client."""

    port: int
    key: str
    address: str
    polite_key: str = ""

    @property
    def polite(self) -> "Intruder":
        """Well-behaved client, which an attack may affect."""
        return replace(self, key=self.polite_key, address="127.0.0.199")

    @property
    def headers(self) -> dict[str, str]:
        """Headers with key and address. The address takes effect only if the server trusts one more proxy."""
        return {"Authorization": f"Bearer {self.key}", "X-Forwarded-For": self.address}

    @contextlib.asynccontextmanager
    async def http(self, *, buffer: int | None = None) -> AsyncIterator[aiohttp.ClientSession]:
        """Open a session. `buffer` limits the received bytes that the client has not read."""
        made = (lambda info: _small(buffer, info[0])) if buffer else None
        connector = aiohttp.TCPConnector(local_addr=(self.address, 0), socket_factory=made)
        url, timeout = f"http://127.0.0.1:{self.port}", aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(url, connector=connector, timeout=timeout, headers=self.headers) as http:
            yield http

    async def post(self, path: str, body: Json | bytes, **headers: str) -> str:
        """Send a POST request and return the status. Discards the body of the response."""
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
        """Open a WebSocket that the client closes without waiting for the server."""
        async with self.http(buffer=buffer) as http:
            timeout = aiohttp.ClientWSTimeout(ws_close=0.5)
            async with http.ws_connect(path, protocols=tuple(protocols), timeout=timeout, max_msg_size=0) as talking:
                yield talking

    async def say(
        self, path: str, messages: Iterable[str | Json], *, reads_s: float = 0.5, protocols: Iterable[str] = ()
    ) -> str:
        """Send messages, read until the server is silent for `reads_s`, and disconnect."""
        async with self.talking(path, protocols=protocols) as talking:
            for message in messages:
                await talking.send_str(message if isinstance(message, str) else json.dumps(message))
            return await rest(talking, reads_s)

    @contextlib.asynccontextmanager
    async def raw(self) -> AsyncIterator[socket.socket]:
        """Open a raw connection that reads only on request."""
        loop = asyncio.get_running_loop()
        with _small(4096) as raw:
            raw.bind((self.address, 0))
            await loop.sock_connect(raw, ("127.0.0.1", self.port))
            yield raw

    def request(self, body: bytes, *, announced: int | None = None) -> bytes:
        return request(body, self.headers, announced=announced)


def _small(buffer: int, family: int = socket.AF_INET) -> socket.socket:
    """Return a socket with a small receive buffer."""
    raw = socket.socket(family)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    raw.setblocking(False)
    return raw


async def status_of(http: aiohttp.ClientSession, path: str) -> str:
    """Send a GET request and return its status."""
    async with http.get(path) as answer:
        async for _ in answer.content.iter_any():
            pass
        return str(answer.status)


async def rest(talking: aiohttp.ClientWebSocketResponse, within_s: float) -> str:
    """Return "open" if the WebSocket stays silent for `within_s`, or else the reason for its close."""
    try:
        while True:
            message = await talking.receive(within_s)
            if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                return f"closed {talking.close_code}"
    except TimeoutError:
        return "open"


async def first_line(raw: socket.socket, within_s: float = HELD_S) -> str:
    """Read a response from a raw connection and return its status."""
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
    """Upgrade a raw connection to a WebSocket of the native path."""
    await sent(raw, handshake(key))
    async with asyncio.timeout(HELD_S):
        while b"\r\n\r\n" not in (data := await asyncio.get_running_loop().sock_recv(raw, 4096)):
            if not data:
                raise EOFError
