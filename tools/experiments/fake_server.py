"""A speech server without a model: `python -m tools.experiments.fake_server PORT`. It measures what the client can do.

It does as little as it can for each request, so that the cores are the client's: HTTP by hand, in one thread.
"""

import asyncio
import json
import sys

FRAME = b"\x00\x40" * 1920  # 80 ms at 24 kHz
FRAME_S = 0.08
RAMP = (1, 2, 4, 8)
STEADY = 12
RTF = 0.4
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: audio/pcm\r\nContent-Length: %d\r\n\r\n"
AUDIO = memoryview(FRAME * max(*RAMP, STEADY))


class FakeConnection(asyncio.Protocol):
    """One connection: as many frames as asked for, in chunks that grow, faster than playback."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exception: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(lines.get(b"content-length", 0))
        if len(rest) < length:
            return
        self._received = rest[length:]
        frames = int(json.loads(rest[:length]).get("max_new_tokens", 72)) - 1 if length else 0
        self._write(HEAD % (frames * len(FRAME)))
        self._speak(frames, 0)

    def _speak(self, frames: int, number: int) -> None:
        """Chunk after chunk, each once it is made."""
        if frames:
            size = min(RAMP[number] if number < len(RAMP) else STEADY, frames)
            self._loop.call_later(size * FRAME_S * RTF, self._send, size, frames, number)

    def _send(self, size: int, frames: int, number: int) -> None:
        self._write(AUDIO[: size * len(FRAME)])
        self._speak(frames - size, number + 1)

    def _write(self, data: bytes | memoryview) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(FakeConnection, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
