"""Ways in which a client can receive audio, each with an independent conversion of the same raw PCM."""

import asyncio
import base64
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

Audio = NDArray[np.float32]  # [samples] within [-1, 1], at RATE
Json = dict[str, Any]

RATE = 24000
_STEP = RATE // 50  # samples per loudness measurement
_QUIET = 0.01  # relative to the loudest step
_PATH = "/v1/audio/speech"
_PATIENCE_S = 600.0  # allowed per utterance, because the machine may be busy
_FULL = (429, 503)  # status codes with a Retry-After header
_PCM = ("-f", "f32le", "-ar", str(RATE), "-ac", "1")


class UtteranceFailed(Exception):
    """Raised if an utterance was not received. The message states the reason."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One utterance to request. `fields` are sent with each request, and `told` is the last event of the response."""

    text: str
    seed: int
    fields: Json
    told: Json = field(default_factory=dict)

    @property
    def body(self) -> Json:
        return {"input": self.text, "seed": self.seed, "response_format": "pcm", "sample_rate": RATE, **self.fields}


Listen = Callable[[aiohttp.ClientSession, Asked], Awaitable[Audio]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to receive audio, and ffmpeg's arguments for the same conversion of raw PCM; empty if not needed.

    `coded` names the intermediate format that ffmpeg writes and reads again.
    """

    name: str
    listen: Listen
    filters: tuple[str, ...] = ()
    coded: tuple[str, ...] = ()
    raw: tuple[str, ...] = ()  # ffmpeg input options, if the `coded` format is not self-describing
    seed: int | None = None  # seed of all utterances; None: one seed per utterance
    is_compared: bool = True  # whether to compare with raw PCM for the same text and seed
    trails: bool = False  # text arrives during generation, so speech differs from that of a complete text

    @property
    def same_speech(self) -> Listen:
        """Function that requests the same speech as raw PCM."""
        return _trailing if self.trails else plain

    def convert(self, audio: Audio) -> Audio:
        """Convert raw PCM with ffmpeg, which is independent of the server."""
        if not self.filters and not self.coded:
            return audio
        converted = ffmpeg(audio.tobytes(), _PCM, (*self.filters, *(self.coded or _PCM)))
        return decoded(converted, self.raw) if self.coded else np.frombuffer(converted, np.float32)


def ffmpeg(content: bytes, given: tuple[str, ...], wanted: tuple[str, ...]) -> bytes:
    """Convert content to another form. Raises UtteranceFailed with ffmpeg's message."""
    command = ["ffmpeg", "-v", "error", "-threads", "1", *given, "-i", "pipe:0", *wanted, "pipe:1"]
    done = subprocess.run(command, input=content, capture_output=True, check=False)
    if done.returncode:
        raise UtteranceFailed(f"ffmpeg: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def decoded(content: bytes, raw: tuple[str, ...] = ()) -> Audio:
    """Return the samples of an audio file, or of raw audio described by `raw`, as ffmpeg decodes them."""
    return np.frombuffer(ffmpeg(content, raw, _PCM), np.float32)


def plain_pcm(content: bytes) -> Audio:
    """Convert s16le bytes to samples."""
    samples: Audio = np.frombuffer(content[: len(content) // 2 * 2], "<i2").astype(np.float32) / np.float32(32768)
    return samples


async def plain(http: aiohttp.ClientSession, asked: Asked) -> Audio:
    """Return the streamed PCM body of `POST /v1/audio/speech`."""
    return plain_pcm(await _fetch(http, asked.body))


async def _fetch(http: aiohttp.ClientSession, body: Json) -> bytes:
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            async with http.post(_PATH, json=body) as answer:
                content = await answer.read()
            if answer.status == 200:
                return content
            if answer.status not in _FULL:
                raise UtteranceFailed(f"HTTP {answer.status}: {content.decode(errors='replace')[:300]}")
            await asyncio.sleep(float(answer.headers.get("retry-after", 1)))


def _posted(raw: tuple[str, ...] = (), **fields: object) -> Listen:
    async def listen(http: aiohttp.ClientSession, asked: Asked) -> Audio:
        content = await _fetch(http, {**asked.body, **fields})
        return await asyncio.to_thread(decoded, content, raw)

    return listen


async def _whole(http: aiohttp.ClientSession, asked: Asked) -> Audio:
    return plain_pcm(await _fetch(http, {**asked.body, "stream": False}))


async def _events(http: aiohttp.ClientSession, asked: Asked) -> Audio:
    content = await _fetch(http, {**asked.body, "stream_format": "sse"})
    events = [json.loads(line[6:]) for line in content.decode().splitlines() if line.startswith("data: {")]
    if failed := [event for event in events if event["type"] == "speech.audio.error"]:
        raise UtteranceFailed(str(failed[0]))
    asked.told.update(events[-1])
    return plain_pcm(b"".join(base64.b64decode(event["audio"]) for event in events if "audio" in event))


async def _trailing(http: aiohttp.ClientSession, asked: Asked) -> Audio:
    return plain_pcm(await _fetch(http, {**asked.body, "non_streaming_mode": False}))


def _written(parts: Callable[[str], list[str]]) -> Listen:
    """Receive speech over vLLM-Omni's WebSocket, which accepts a seed."""

    async def listen(http: aiohttp.ClientSession, asked: Asked) -> Audio:
        audio = b""
        config = {name: value for name, value in asked.body.items() if name != "input"}
        async with asyncio.timeout(_PATIENCE_S), http.ws_connect(f"{_PATH}/stream") as socket:
            await socket.send_json({"type": "session.config", **config})
            for part in parts(asked.text):
                await socket.send_json({"type": "input.text", "text": part})
            await socket.send_json({"type": "input.done"})
            async for heard, told in _received(socket):
                audio += heard
                if told.get("type") == "session.done":
                    return plain_pcm(audio)
        raise UtteranceFailed("the WebSocket was closed before session.done")

    return listen


async def _received(socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[tuple[bytes, Json]]:
    """Yield pairs of audio and message, one of which is empty. Raises `UtteranceFailed` for an error message."""
    async for message in socket:
        if message.type is aiohttp.WSMsgType.BINARY:
            yield message.data, {}
        elif message.type is aiohttp.WSMsgType.TEXT:
            told = json.loads(message.data)
            if str(told.get("type")).lower() in ("error", "warning"):
                raise UtteranceFailed(message.data)
            yield b"", told


_INTERRUPTED = "This sentence is much longer than anybody wants to hear, which is why it will be interrupted."


async def _after_interruption(http: aiohttp.ClientSession, asked: Asked) -> Audio:
    """Clear a sentence during playback on Deepgram's WebSocket, and return the next sentence from the same socket."""
    voice = asked.fields.get("voice", "")
    query = f"model={voice}&encoding=linear16&sample_rate={RATE}"
    audio, cleared = b"", False
    async with asyncio.timeout(_PATIENCE_S), http.ws_connect(f"/v1/speak?{query}") as socket:
        await socket.send_json({"type": "Speak", "text": _INTERRUPTED})
        await socket.send_json({"type": "Flush"})
        begun = False
        async for part, told in _received(socket):
            if part and not begun:
                begun = True
                await socket.send_json({"type": "Clear"})
            elif told.get("type") == "Cleared":
                cleared = True
                await socket.send_json({"type": "Speak", "text": asked.text})
                await socket.send_json({"type": "Flush"})
            elif cleared:
                audio += part
                if told.get("type") == "Flushed":
                    return plain_pcm(audio)
    raise UtteranceFailed("the WebSocket was closed before Flushed")


def _words(text: str) -> list[str]:
    return [f"{word} " for word in text.split(" ")]


def _at_speed(speed: float) -> Way:
    listen = _posted(("-f", "s16le", "-ar", str(RATE), "-ac", "1"), speed=speed)
    return Way(f"speed {speed:g}", listen, filters=("-af", f"atempo={speed:g}"))


def _telephone(name: str, response_format: str) -> Way:
    raw = ("-f", response_format, "-ar", "8000", "-ac", "1")
    coded = ("-ar", "8000", "-c:a", f"pcm_{response_format}", "-f", response_format)
    listen = _posted(raw, response_format=response_format, sample_rate=8000)
    return Way(f"{name}, 8 kHz", listen, coded=coded, raw=raw)


def _file(response_format: str, *coded: str) -> Way:
    return Way(f"{response_format}", _posted(response_format=response_format), coded=coded)


PLAIN = Way("plain PCM", plain)
EVENTS = Way("server-sent events", _events)
WAYS = (
    _file("mp3", "-c:a", "libmp3lame", "-b:a", "128k", "-f", "mp3"),
    _file("opus", "-c:a", "libopus", "-b:a", "48k", "-f", "ogg"),
    _file("aac", "-c:a", "aac", "-b:a", "64k", "-f", "adts"),
    _file("flac", "-c:a", "flac", "-f", "flac"),
    _file("wav", "-c:a", "pcm_s16le", "-f", "wav"),
    Way("float32", _posted(_PCM, response_format="pcm_f32le")),
    Way(
        "PCM, 16 kHz",
        _posted(("-f", "s16le", "-ar", "16000", "-ac", "1"), sample_rate=16000),
        coded=("-ar", "16000", "-f", "s16le"),
        raw=("-f", "s16le", "-ar", "16000", "-ac", "1"),
    ),
    _telephone("mu-law", "mulaw"),
    _telephone("A-law", "alaw"),
    *map(_at_speed, (0.5, 0.75, 1.25, 1.5, 2.0)),
    Way("whole body (`stream: false`)", _whole),
    EVENTS,
    Way("text trails the speech (`non_streaming_mode: false`)", _trailing, trails=True),
    Way("whole text over a WebSocket", _written(lambda text: [text]), trails=True),
    Way("live text, word by word over a WebSocket", _written(_words), trails=True),
    Way("after an interruption on the same socket", _after_interruption, trails=True),
)


def sounding(audio: Audio) -> tuple[int, int]:
    """Return the first and last audible sample, or the whole range if all samples are silent."""
    levels = np.sqrt(np.mean(np.square(audio[: len(audio) // _STEP * _STEP].reshape(-1, _STEP)), axis=1))
    (loud,) = np.nonzero(levels > _QUIET * levels.max(initial=1e-9))
    return (int(loud[0]) * _STEP, int(loud[-1] + 1) * _STEP) if len(loud) else (0, len(audio))


def level_db(audio: Audio) -> float:
    """Return the level of [samples] in dBFS."""
    return 20 * float(np.log10(max(1e-5, np.sqrt(np.mean(np.square(audio)) if len(audio) else 0.0))))
