"""Well-behaved clients, each with its own address and key, that listen to the end of their streams."""

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import numpy as np

from tools.suites.raw import SPEECH

Json = Mapping[str, Any]

BOUND_S = 180.0  # limit of a stream; longer streams count as hung
BYTES_PER_S = 48_000
SENTENCES = (
    "Yes.",
    "Good morning, and thank you for calling.",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Your table for two is booked for half past seven on Friday, the fourth of May.",
    "Between the harbour and the old town there is a narrow street that few visitors ever find.",
    "She counted the steps down to the river, forty-two of them, and then she counted them again on the way back.",
)


def body(text: str, voice: str) -> dict[str, object]:
    """Return a request in the format of OpenAI's clients."""
    return {"model": "gpt-4o-mini-tts", "input": text, "voice": voice, "response_format": "pcm"}


def difference(pcm: bytes, expected: bytes) -> str | None:
    """Describe the difference between two deliveries of an utterance. Samples may differ by 1."""
    if len(pcm) != len(expected):
        return f"{len(pcm)} bytes, not {len(expected)}"
    one, other = (np.frombuffer(each, "<i2").astype(int) for each in (pcm, expected))
    worst = int(np.abs(one - other).max(initial=0))
    return f"samples differ by {worst}" if worst > 1 else None


@dataclass(slots=True)
class Stream:
    """One request and its outcome. Times are from time.monotonic()."""

    way: str
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    first_s: float | None = None  # arrival of the first audio
    gap_s: float = 0.0  # longest later time without audio
    outcome: str = "hung"  # whole, refused, unreached, broken, failed, hung
    detail: str = ""
    num_bytes: int = 0  # PCM bytes
    last_s: float = 0.0

    def take(self, data: bytes) -> None:
        """Record received audio."""
        now_s = time.monotonic()
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.gap_s = max(self.gap_s, now_s - self.last_s)
        self.last_s = now_s
        self.num_bytes += len(data)

    def end(self, outcome: str, detail: str = "") -> None:
        self.ended_s, self.outcome, self.detail = time.monotonic(), outcome, detail


class Refused(Exception):
    """Error for a request that is rejected with a status, before any audio."""


class UnexpectedAnswer(Exception):
    """Error for a response that a well-behaved client should not receive."""


def _elevenlabs(fields: Json, context: str) -> list[Json]:
    messages: tuple[Json, ...] = ({"text": fields["input"]}, {"text": "", "flush": True}, {"close_context": True})
    return [{**each, "context_id": context} for each in messages]


def _realtime(fields: Json, _: str) -> list[Json]:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": fields["input"]}]}
    asked = {"input": [item], "audio": {"output": {"voice": fields["voice"]}}}
    return [{"type": "response.create", "response": asked}]


# By WebSocket path: the messages that request an utterance in a separate context.
SOCKETS: dict[str, tuple[str, Callable[[Json, str], list[Json]]]] = {
    "WebSocket": (f"{SPEECH}/ws", lambda fields, _: [{"type": "speak", **fields}]),
    "ElevenLabs": ("/v1/text-to-speech/{voice}/multi-stream-input?output_format=pcm_24000", _elevenlabs),
    "Realtime": ("/v1/realtime?model=gpt-realtime", _realtime),
}


class PoliteClient:
    """Client that uses HTTP or one persistent WebSocket. `way` is "HTTP" or a key of `SOCKETS`."""

    def __init__(self, key: str, url: str, address: str, *, way: str) -> None:
        self._way, self._url, self._address = way, url, address
        # Servers that trust an additional proxy use this address.
        self._headers = {"Authorization": f"Bearer {key}", "X-Forwarded-For": address}
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._num_asked = 0

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(local_addr=(self._address, 0))
        self._http = aiohttp.ClientSession(self._url, timeout=timeout, connector=connector, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def speak(self, fields: Json) -> Stream:
        """Send one request and receive the response to its end."""
        stream = Stream(self._way)
        try:
            async with asyncio.timeout(BOUND_S):
                await (self._over_http if self._way == "HTTP" else self._over_socket)(fields, stream)
            stream.end("whole")
        except TimeoutError:
            stream.end("hung", f"{stream.num_bytes} bytes in {BOUND_S:.0f} s")
        except Refused as error:
            stream.end("refused", str(error))
        except UnexpectedAnswer as error:
            stream.end("failed", str(error))
        except (aiohttp.ClientError, OSError) as error:
            stream.end("broken" if stream.num_bytes else "unreached", f"{type(error).__name__}: {error}"[:160])
        if stream.outcome != "whole":
            await self._hang_up()
        return stream

    async def _over_http(self, fields: Json, stream: Stream) -> None:
        async with self._http.post(SPEECH, json=fields) as answer:
            if answer.status != 200:
                raise refusal(answer.status, await answer.text())
            async for data in answer.content.iter_any():
                stream.take(data)

    async def _over_socket(self, fields: Json, stream: Stream) -> None:
        path, asking = SOCKETS[self._way]
        if self._socket is None or self._socket.closed:
            try:
                self._socket = await self._http.ws_connect(path.format_map(fields))
            except aiohttp.WSServerHandshakeError as error:
                raise refusal(error.status, error.message) from error
        self._num_asked += 1
        for message in asking(fields, str(self._num_asked)):
            await self._socket.send_json(message)
        async for heard in _heard(self._socket):
            if isinstance(heard, bytes):
                stream.take(heard)
            elif wrong := heard.get("error"):
                code = (wrong if isinstance(wrong, dict) else heard)["code"]
                raise broken(stream, wrong) if stream.num_bytes else refusal(_STATUS.get(str(code), 0), str(wrong))
            elif heard.get("type") == "response.output_audio.delta":
                stream.take(base64.b64decode(heard["delta"]))
            elif heard.get("isFinal") or heard.get("type") in ("done", "response.done"):
                return
            elif heard.get("audio"):
                stream.take(base64.b64decode(heard["audio"]))

    async def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._socket.close()
            self._socket = None


async def _heard(socket: aiohttp.ClientWebSocketResponse) -> AsyncGenerator[dict[str, Any] | bytes, None]:
    """Yield audio and messages. Raises if the socket ends."""
    while True:
        message = await socket.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            yield message.data
        elif message.type is aiohttp.WSMsgType.TEXT:
            yield json.loads(message.data)
        else:
            raise aiohttp.ClientConnectionError(f"the socket ended: {message.type.name} {message.data} {message.extra}")


_STATUS = {"rate_limit_exceeded": 429, "not_ready": 503, "replica_lost": 503}  # by error code on a socket


def refusal(status: int, text: str) -> Exception:
    """Convert a status to an error. Overloaded and unready servers are worth a retry; other statuses are failures."""
    said = f"{status} {text[:160]}"
    return Refused(said) if status in (429, 502, 503, 504) else UnexpectedAnswer(said)


def broken(stream: Stream, wrong: object) -> Exception:
    return aiohttp.ClientPayloadError(f"after {stream.num_bytes} bytes: {wrong}")
