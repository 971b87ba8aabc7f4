"""Hostile clients on raw sockets. Each can use its own address, 127.0.0.x."""

import base64
import contextlib
import http.client
import json
import os
import socket
import ssl
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

BOUND_S = 60.0
SPEECH = "/v1/audio/speech"


@contextlib.contextmanager
def answered(
    port: int, sent: Mapping[str, object] | bytes | None = None, *, operation: str = f"POST {SPEECH}",
    host: str = "127.0.0.1", source: str = "127.0.0.1", headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[http.client.HTTPResponse]:  # fmt: skip
    """Send one request on a new connection, and yield the response. `sent`: JSON fields, or a body."""
    own: dict[str, Any] = {"timeout": BOUND_S, "source_address": (source, 0)}
    plain = http.client.HTTPConnection(host, port, **own)
    connection = plain if tls is None else http.client.HTTPSConnection(host, port, context=tls, **own)
    with contextlib.closing(connection):
        method, path = operation.split()
        body = json.dumps(sent) if isinstance(sent, Mapping) else sent
        connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
        yield connection.getresponse()


def ask(port: int, sent: Any = None, **how: Any) -> tuple[int, dict[str, str], bytes]:
    """Send one request with the arguments of `answered`, and return status, headers and body."""
    with answered(port, sent, **how) as answer:
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def connected(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), BOUND_S, source_address=(source, 0))


def request(body: bytes, headers: Mapping[str, str], *, announced: int | None = None) -> bytes:
    """Return a POST request as bytes. With `announced`, the `Content-Length` exceeds the body."""
    lines = [f"POST {SPEECH} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"Content-Length: {len(body) if announced is None else announced}", "", ""]
    return "\r\n".join(lines).encode() + body


def read_to_end(raw: socket.socket, within_s: float) -> bytes:
    """Read until the other side closes. Raises `TimeoutError` after `within_s` without data."""
    raw.settimeout(within_s)
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := raw.recv(65536):
            received += data
    return received


def handshake(key: str, *, path: str = f"{SPEECH}/ws", compressed: bool = False) -> bytes:
    """Return a WebSocket handshake, which requests compression if `compressed`."""
    nonce = base64.b64encode(os.urandom(16)).decode()
    lines = [
        f"GET {path} HTTP/1.1", "Host: localhost", "Connection: Upgrade", "Upgrade: websocket",
        "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {nonce}", f"Authorization: Bearer {key}",
        *(["Sec-WebSocket-Extensions: permessage-deflate"] if compressed else []),
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode()


def frame(payload: bytes, *, opcode: int = 1, final: bool = True, compressed: bool = False) -> bytes:
    """Return a WebSocket frame. The mask is zero, which is valid."""
    size = len(payload)
    first = opcode | (0x80 if final else 0) | (0x40 if compressed else 0)
    short = struct.pack("!BB", first, 0x80 | size) if size < 126 else b""
    medium = struct.pack("!BBH", first, 0x80 | 126, size) if size < 65536 else b""
    return (short or medium or struct.pack("!BBQ", first, 0x80 | 127, size)) + b"\0\0\0\0" + payload


class RawSocket:
    """WebSocket without a library, so it can send invalid frames."""

    def __init__(self, raw: socket.socket, *, key: str, compressed: bool = False) -> None:
        """Open the WebSocket. `compressed` requests compression."""
        self.raw = raw
        raw.sendall(handshake(key, compressed=compressed))
        self._received = b""
        status, *headers = self._head().splitlines()
        self.status = int(status.split()[1])
        pairs = (line.partition(":") for line in headers)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}

    @property
    def compresses(self) -> bool:
        """Whether the server accepted compression."""
        return "permessage-deflate" in self.headers.get("sec-websocket-extensions", "")

    def send(self, payload: bytes, *, opcode: int = 1, final: bool = True, compressed: bool = False) -> None:
        self.raw.sendall(frame(payload, opcode=opcode, final=final, compressed=compressed))

    def say(self, **fields: object) -> None:
        self.send(json.dumps(fields).encode())

    def receive(self) -> tuple[int, bytes]:
        """Return opcode and payload of one frame. Raises `EOFError` at the end of the connection."""
        head = self._exactly(2)
        size = head[1] & 0x7F
        if size >= 126:
            size = int.from_bytes(self._exactly(2 if size == 126 else 8), "big")
        return head[0] & 0x0F, self._exactly(size)

    def messages(self) -> Iterator[dict[str, object]]:
        """Yield JSON messages until the socket closes, and the close itself as a message."""
        while True:
            try:
                opcode, payload = self.receive()
            except (EOFError, ConnectionError):
                yield {"type": "lost"}
                return
            if opcode == 1:
                yield json.loads(payload)
            if opcode == 8:
                yield {"type": "close", "code": int.from_bytes(payload[:2], "big"), "reason": payload[2:].decode()}
                return

    def _head(self) -> str:
        while b"\r\n\r\n" not in self._received:
            self._more()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        return head.decode()

    def _exactly(self, size: int) -> bytes:
        while len(self._received) < size:
            self._more()
        data, self._received = self._received[:size], self._received[size:]
        return data

    def _more(self) -> None:
        if not (data := self.raw.recv(65536)):
            raise EOFError
        self._received += data


def deflated(size: int) -> bytes:
    """Return `size` spaces as the payload of a compressed frame, at a thousandth of the size."""
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -12)
    return squeeze.compress(b" " * size) + squeeze.flush(zlib.Z_SYNC_FLUSH)[:-4]
