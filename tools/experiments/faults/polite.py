"""Clients that behave: each has an address and a key of its own, listens to the end, and asks again if refused."""

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import numpy as np

from tools.suites.raw import SPEECH

BOUND_S = 180.0  # for a whole stream: what takes longer hangs
SAMPLE_BYTES, BYTES_PER_S = 2, 48_000
SENTENCES = (
    "Yes.",
    "Good morning, and thank you for calling.",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Your table for two is booked for half past seven on Friday, the fourth of May.",
    "Between the harbour and the old town there is a narrow street that few visitors ever find.",
    "She counted the steps down to the river, forty-two of them, and then she counted them again on the way back.",
)


def body(text: str, voice: str, seed: int, frames: int | None) -> dict[str, object]:
    """A request as a client of OpenAI's sends it."""
    fields: dict[str, object] = {"model": "gpt-4o-mini-tts", "input": text, "voice": voice, "response_format": "pcm"}
    endless = {"ignore_eos": True, "max_new_tokens": frames} if frames else {}
    return {**fields, "seed": seed, **endless}


@dataclass(slots=True)
class Stream:
    """One request and what became of it. Times are of time.monotonic()."""

    client: str
    way: str
    utterance: int
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    first_s: float | None = None  # when its first audio came
    gap_s: float = 0.0  # the longest time without audio after that
    outcome: str = "hung"  # whole, wrong, refused, unreached, broken, failed, hung
    detail: str = ""

    @property
    def lost(self) -> bool:
        """Whether it had been taken and did not end as it should."""
        return self.outcome in ("broken", "wrong", "hung", "failed")


def difference(pcm: bytes, expected: bytes) -> str | None:
    """What is not the same about two deliveries of an utterance; samples may differ by 1."""
    if len(pcm) != len(expected):
        return f"{len(pcm)} bytes, not {len(expected)}"
    one, other = (np.frombuffer(each, "<i2").astype(int) for each in (pcm, expected))
    worst = int(np.abs(one - other).max(initial=0))
    return f"samples differ by {worst}" if worst > 1 else None


class Refused(Exception):
    """Before any audio, with a status."""


class UnexpectedAnswer(Exception):
    """An answer that no polite client should get."""


class Listening:
    """The audio of one stream as it comes."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._last_s = stream, 0.0
        self.pcm = bytearray()

    def take(self, data: bytes) -> None:
        now_s = time.monotonic()
        if self._stream.first_s is None:
            self._stream.first_s = now_s
        else:
            self._stream.gap_s = max(self._stream.gap_s, now_s - self._last_s)
        self._last_s = now_s
        self.pcm += data


class PoliteClient:
    """One that speaks over HTTP, or over a WebSocket that it keeps; `way` is one of `WAYS`."""

    def __init__(self, name: str, key: str, url: str, address: str, *, way: str) -> None:
        self.name, self.key = name, key
        self._way = way
        self._url, self._address = url, address
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._socket_key = ""
        self._num_contexts = 0

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(local_addr=(self._address, 0))
        # Servers that trust another proxy in front of their own believe it.
        headers = {"X-Forwarded-For": self._address}
        self._http = aiohttp.ClientSession(self._url, timeout=timeout, connector=connector, headers=headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def speak(self, number: int, fields: Mapping[str, object], expected: bytes | None) -> tuple[Stream, bytes]:
        """One request; `expected` is what it brings without kills, None where that is asked for."""
        stream, key = Stream(self.name, self._way, number), self.key
        listening = Listening(stream)
        try:
            async with asyncio.timeout(BOUND_S):
                await WAYS[self._way](self, fields, listening)
            problem = difference(listening.pcm, expected) if expected is not None else None
            stream.outcome, stream.detail = ("wrong", problem) if problem else ("whole", "")
        except TimeoutError:
            stream.detail = f"{len(listening.pcm)} bytes in {BOUND_S:.0f} s"
        except Refused as error:
            stream.outcome, stream.detail = "refused", str(error)
        except UnexpectedAnswer as error:
            # A key may be revoked while a request with it is on its way: the next one has the new key.
            rotated = self.key != key and str(error).startswith("401")
            stream.outcome, stream.detail = "refused" if rotated else "failed", str(error)
        except (aiohttp.ClientError, OSError) as error:
            stream.outcome = "broken" if listening.pcm else "unreached"
            stream.detail = f"{type(error).__name__}: {error}"[:160]
        stream.ended_s = time.monotonic()
        if stream.outcome != "whole":
            await self._hang_up()
        return stream, bytes(listening.pcm)

    async def _over_http(self, fields: Mapping[str, object], listening: Listening) -> None:
        async with self._http.post(SPEECH, json=fields, headers=self._bearer()) as answer:
            if answer.status != 200:
                raise refusal(answer.status, await answer.text())
            async for data in answer.content.iter_any():
                listening.take(data)

    async def _over_socket(self, fields: Mapping[str, object], listening: Listening) -> None:
        socket = await self._connected(f"{SPEECH}/ws")
        await socket.send_json({"type": "speak", **fields})
        async for message in _heard(socket):
            if isinstance(message, bytes):
                listening.take(message)
            elif message["type"] == "done":
                return
            elif message["type"] == "error":
                raise _unwelcome(listening, message["error"], str(message["error"]["code"]))

    async def _over_flux(self, fields: Mapping[str, object], listening: Listening) -> None:
        """A turn of Deepgram's: words, a flush, audio, and what it was."""
        socket = await self._connected(f"/v2/speak?model=flux-{fields['voice']}-en&encoding=linear16&sample_rate=24000")
        await socket.send_json({"type": "Speak", "text": fields["input"]})
        await socket.send_json({"type": "Flush"})
        async for message in _heard(socket):
            if isinstance(message, bytes):
                listening.take(message)
            elif message["type"] == "SpeechMetadata":
                return
            elif message["type"] in ("Error", "Warning"):
                raise _unwelcome(listening, message, str(message["code"]))

    async def _over_elevenlabs(self, fields: Mapping[str, object], listening: Listening) -> None:
        socket = await self._connected(
            f"/v1/text-to-speech/{fields['voice']}/multi-stream-input?output_format=pcm_24000"
        )
        self._num_contexts += 1
        context = {"context_id": str(self._num_contexts)}
        await socket.send_json({"text": fields["input"], **context})
        await socket.send_json({"text": "", "flush": True, **context})
        await socket.send_json({"close_context": True, **context})
        async for message in _heard(socket):
            assert not isinstance(message, bytes)
            if "error" in message:
                raise _unwelcome(listening, message, str(message["code"]))
            if message["isFinal"]:
                return
            if audio := base64.b64decode(message["audio"]):
                listening.take(audio)

    async def _over_realtime(self, fields: Mapping[str, object], listening: Listening) -> None:
        socket = await self._connected("/v1/realtime?model=gpt-realtime")
        said = [{"type": "input_text", "text": fields["input"]}]
        item = {"type": "message", "role": "user", "content": said}
        asked = {"input": [item], "audio": {"output": {"voice": fields["voice"]}}}
        await socket.send_json({"type": "response.create", "response": asked})
        async for message in _heard(socket):
            assert not isinstance(message, bytes)
            if message["type"] == "response.output_audio.delta":
                listening.take(base64.b64decode(message["delta"]))
            elif message["type"] == "error":
                raise _unwelcome(listening, message["error"], str(message["error"]["code"]))
            elif message["type"] == "response.done":
                return

    async def _connected(self, path: str) -> aiohttp.ClientWebSocketResponse:
        """The socket; another one where it is closed, or where its key is no longer ours."""
        if self._socket is None or self._socket.closed or self._socket_key != self.key:
            await self._hang_up()
            self._socket_key = self.key
            try:
                self._socket = await self._http.ws_connect(path, headers=self._bearer())
            except aiohttp.WSServerHandshakeError as error:
                raise refusal(error.status, error.message) from error
        return self._socket

    async def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._socket.close()
            self._socket = None

    def _bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


Ask = Callable[[PoliteClient, Mapping[str, object], Listening], Awaitable[None]]
WAYS: dict[str, Ask] = {
    "HTTP": PoliteClient._over_http,
    "WebSocket": PoliteClient._over_socket,
    "ElevenLabs": PoliteClient._over_elevenlabs,
    "Flux": PoliteClient._over_flux,
    "Realtime": PoliteClient._over_realtime,
}


async def _heard(socket: aiohttp.ClientWebSocketResponse) -> AsyncGenerator[dict[str, Any] | bytes, None]:
    """Audio and messages. Raises where the socket ends."""
    while True:
        message = await socket.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            yield message.data
        elif message.type is aiohttp.WSMsgType.TEXT:
            yield json.loads(message.data)
        else:
            raise aiohttp.ClientConnectionError(f"the socket ended: {message.type.name} {message.data} {message.extra}")


def _unwelcome(listening: Listening, error: Mapping[str, object], code: str) -> Exception:
    """What an error is: a refusal, or where audio has come a stream that broke."""
    return broken(listening, error) if listening.pcm else refusal(_STATUS.get(code, 0), str(error))


_STATUS = {"rate_limit_exceeded": 429, "not_ready": 503, "replica_lost": 503}  # of error codes on a socket


def refusal(status: int, text: str) -> Exception:
    """Too busy and not ready are refusals, to be asked again; what else a polite client is told is a fault."""
    said = f"{status} {text[:160]}"
    return Refused(said) if status in (429, 502, 503, 504) else UnexpectedAnswer(said)


def broken(listening: Listening, error: Mapping[str, object]) -> Exception:
    return aiohttp.ClientPayloadError(f"after {len(listening.pcm)} bytes: {error}")
