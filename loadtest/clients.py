"""One request to an OpenAI-compatible speech server, and what is written down while its audio streams in."""

import asyncio
import contextlib
import json
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

from loadtest.lengths import length_fields
from loadtest.playback import AudibleOnset
from loadtest.server_timing import stages
from loadtest.traces import Clock, Failure, PcmLayout, ScheduledRequest, Trace

DEFAULT_SAMPLE_RATE = 24000  # of response_format pcm, says OpenAI
MAX_WAV_HEADER_BYTES = 65536
MAX_ERROR_BYTES = 200
WAVE_FORMAT_PCM, WAVE_FORMAT_EXTENSIBLE = 0x0001, 0xFFFE
# Below the 5 s after which uvicorn closes an idle connection: a request sent into that would fail, and not by load.
KEEPALIVE_S = 2.0
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)  # `speak` has one of its own, for every transport
REFUSED_STATUS = 429
TRY_AGAIN_LATER = 1013  # WebSocket close code


class NotAudioError(Exception):
    """The body is not the audio that was asked for."""


class AudioFormat(StrEnum):
    """The response formats whose samples can be counted as they arrive, without a decoder."""

    PCM = "pcm"
    WAV = "wav"


CONTENT_TYPES = {
    AudioFormat.PCM: ("audio/pcm", "audio/x-pcm", "audio/l16", "audio/raw", "application/octet-stream"),
    AudioFormat.WAV: ("audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave", "application/octet-stream"),
}


class Transport(StrEnum):
    """How a request travels."""

    HTTP = "http"
    WEBSOCKET = "websocket"  # Talkray's own protocol: one `speak` message a connection


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what all of them say besides their text."""

    base_url: str
    audio_format: AudioFormat
    options: Mapping[str, object]  # fields of the body: model, voice, extensions
    timeout_s: float  # for the whole answer
    transport: Transport = Transport.HTTP
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def speech_url(self) -> str:
        """The speech endpoint; `base_url` may end in /v1, as OpenAI's clients have it."""
        return self.base_url.rstrip("/").removesuffix("/v1") + "/v1/audio/speech"

    @property
    def socket_url(self) -> str:
        """Talkray's WebSocket."""
        return self.speech_url + "/ws"

    def body(self, request: ScheduledRequest) -> dict[str, object]:
        """The JSON body that asks for a text."""
        fixed = {"input": request.text, "response_format": self.audio_format.value}
        return {**self.options, **length_fields(request.frames), **fixed}


class PcmBody:
    """A body that is samples from its first byte on."""

    def __init__(self, layout: PcmLayout) -> None:
        self.layout: PcmLayout | None = layout

    def feed(self, data: bytes) -> bytes:
        """The audio bytes in the next bytes of the body."""
        return data


class WavBody:
    """A RIFF file of 16-bit PCM. `layout` is known once the header is complete."""

    def __init__(self) -> None:
        self.layout: PcmLayout | None = None
        self._head = b""
        self._audio_bytes_left: int | None = None  # None: until the body ends, as streaming encoders leave it

    def feed(self, data: bytes) -> bytes:
        """The audio bytes in the next bytes of the body; raises NotAudioError on anything but 16-bit PCM."""
        if self.layout is None:
            self._head += data
            header = parse_wav_header(self._head)
            if header is None:
                return b""
            self.layout, data = header.layout, self._head[header.num_bytes :]
            self._head, self._audio_bytes_left = b"", header.audio_bytes
        audio = data[: self._audio_bytes_left]
        if self._audio_bytes_left is not None:
            self._audio_bytes_left -= len(audio)
        return audio


@dataclass(frozen=True, slots=True)
class WavHeader:
    """What stands before the samples of a WAV file."""

    layout: PcmLayout
    num_bytes: int
    audio_bytes: int | None  # None: the length was not known when the header was written


def parse_wav_header(head: bytes) -> WavHeader | None:
    """The header at the start of `head`, None while it is incomplete. Raises NotAudioError."""
    if head[:4] != b"RIFF"[: len(head)] or head[8:12] != b"WAVE"[: max(0, len(head) - 8)]:
        raise NotAudioError("asked for wav, but the body does not begin with a RIFF header")
    layout, offset = None, 12
    while len(head) >= offset + 8:
        name, size = struct.unpack_from("<4sI", head, offset)
        offset += 8
        if name == b"data":
            if layout is None:
                raise NotAudioError("the WAV header has no fmt chunk before its data chunk")
            return WavHeader(layout, offset, None if size in (0, 0xFFFFFFFF) else size)
        if name == b"fmt " and len(head) >= offset + 16:
            layout = parse_wav_layout(head[offset : offset + 16])
        offset += size + size % 2
    if len(head) > MAX_WAV_HEADER_BYTES:
        raise NotAudioError(f"no data chunk in the first {MAX_WAV_HEADER_BYTES} bytes of the WAV file")
    return None


def parse_wav_layout(fmt: bytes) -> PcmLayout:
    """The layout in the first 16 bytes of a fmt chunk."""
    tag, channels, sample_rate, _, _, bits = struct.unpack("<HHIIHH", fmt)
    if tag not in (WAVE_FORMAT_PCM, WAVE_FORMAT_EXTENSIBLE) or bits != 16 or not channels or not sample_rate:
        raise NotAudioError(f"only 16-bit PCM is read, not WAV of format {tag:#06x}, {bits} bits, {channels} channels")
    return PcmLayout(sample_rate, channels)


def open_body(audio_format: AudioFormat, headers: Mapping[str, str]) -> PcmBody | WavBody:
    """The reader for an answer with these headers; raises NotAudioError if they announce something else.

    The sample rate of pcm is the `rate` parameter of the content type, else `x-sample-rate`, else 24 kHz.
    """
    media_type, *rest = headers.get("Content-Type", "application/octet-stream").split(";")
    if media_type.strip().lower() not in CONTENT_TYPES[audio_format]:
        raise NotAudioError(f"asked for {audio_format}, the server answered {media_type.strip()}")
    if audio_format is AudioFormat.WAV:
        return WavBody()
    parameters = {name.strip().lower(): value.strip() for name, _, value in (item.partition("=") for item in rest)}
    rate = parameters.get("rate") or headers.get("X-Sample-Rate") or str(DEFAULT_SAMPLE_RATE)
    channels = parameters.get("channels") or "1"
    if not (rate.isdecimal() and channels.isdecimal() and int(rate) and int(channels)):
        raise NotAudioError(f"sample rate {rate!r} or number of channels {channels!r} is not a number above 0")
    return PcmBody(PcmLayout(int(rate), int(channels)))


class Recording:
    """A request on its way: takes times and bytes as they come. Counts as sent from its construction on."""

    def __init__(self, request: ScheduledRequest, clock: Clock) -> None:
        self.request = request
        self.clock = clock
        self.sent_s = clock.now_s()
        self.first_byte_s: float | None = None
        self.status: int | None = None
        self.request_id: str | None = None
        self.retry_after_s: float | None = None
        self.failure: Failure | None = None
        self.error: str | None = None
        self.num_bytes = 0
        self.num_audio_bytes = 0
        self.body: PcmBody | WavBody | None = None
        self.onset: AudibleOnset | None = None
        self.chunks: list[tuple[float, int]] = []
        self.sent_at_s = time.time()
        self.server_timing: str | None = None

    def receive(self, data: bytes) -> None:
        """Take bytes of the body that were read just now."""
        now_s = self.clock.now_s()
        self.first_byte_s = now_s if self.first_byte_s is None else self.first_byte_s
        self.num_bytes += len(data)
        if self.body is None:
            return
        audio = self.body.feed(data)
        if audio and self.body.layout:
            self.num_audio_bytes += len(audio)
            self.chunks.append((now_s, self.num_audio_bytes))
            self.onset = self.onset or AudibleOnset(self.body.layout.sample_rate, self.body.layout.channels)
            self.onset.feed(audio)

    def check_complete(self) -> None:
        """Raises NotAudioError unless what came is a whole number of samples, and at least one."""
        layout = self.body.layout if self.body else None
        if layout is None or not self.chunks:
            raise NotAudioError(f"the answer ended after {self.num_bytes} bytes without any audio")
        if self.num_audio_bytes % layout.frame_bytes:
            raise NotAudioError(f"the audio ended in the middle of a sample, after {self.num_audio_bytes} bytes")

    def fail(self, failure: Failure, error: str) -> None:
        """Say why the request did not succeed."""
        self.failure, self.error = failure, error

    def trace(self) -> Trace:
        """The finished request; its end is now."""
        return Trace(
            index=self.request.index,
            planned_s=self.request.planned_s,
            sent_s=self.sent_s,
            finished_s=self.clock.now_s(),
            first_byte_s=self.first_byte_s,
            status=self.status,
            failure=self.failure,
            error=self.error,
            request_id=self.request_id,
            retry_after_s=self.retry_after_s,
            num_bytes=self.num_bytes,
            layout=self.body.layout if self.body else None,
            audible_sample=self.onset.sample if self.onset else None,
            chunks=tuple(self.chunks),
            server_timing_s=self._stages(),
        )

    def _stages(self) -> dict[str, float] | None:
        if self.server_timing is None or self.first_byte_s is None:
            return None
        return stages(self.server_timing, sent_at_s=self.sent_at_s, ttfb_s=self.first_byte_s - self.sent_s)


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    """A session that reuses connections and never makes a request wait for one."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


async def speak(session: aiohttp.ClientSession, target: Target, *, recording: Recording) -> None:
    """Send the recording's request and record its answer to the end. Failures are recorded, not raised."""
    exchange = _converse if target.transport is Transport.WEBSOCKET else _exchange
    try:
        async with asyncio.timeout(target.timeout_s):
            await exchange(session, target, recording)
    except TimeoutError:
        recording.fail(Failure.TIMEOUT, f"no complete answer within {target.timeout_s:g} s")
    except aiohttp.WSServerHandshakeError as error:
        _fail_with_status(recording, error.status, message=error.message, headers=error.headers or {})
    except (aiohttp.ClientError, OSError) as error:
        answered = recording.status is not None
        recording.fail(Failure.BROKEN_BODY if answered else Failure.CONNECTION, str(error) or type(error).__name__)
    except NotAudioError as error:
        recording.fail(Failure.NOT_AUDIO, str(error))


async def _exchange(session: aiohttp.ClientSession, target: Target, recording: Recording) -> None:
    body = target.body(recording.request)
    async with session.post(target.speech_url, json=body, headers=target.headers, timeout=NO_TIMEOUT) as response:
        recording.request_id = response.headers.get("X-Request-Id")
        if response.status != 200:
            message = error_message(await response.read())
            _fail_with_status(recording, response.status, message=message, headers=response.headers)
            return
        recording.status = response.status
        recording.server_timing = response.headers.get("Server-Timing")
        recording.body = open_body(target.audio_format, response.headers)
        async for data in response.content.iter_any():
            recording.receive(data)
        recording.check_complete()


def _fail_with_status(recording: Recording, status: int, *, message: str, headers: Mapping[str, str]) -> None:
    recording.status = status
    recording.retry_after_s = retry_after(headers)
    recording.fail(Failure.REFUSED if status == REFUSED_STATUS else Failure.HTTP, message)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of advice in `retry-after-ms` or `Retry-After`, None without any that is a number."""
    for name, per_second in (("retry-after-ms", 1000), ("Retry-After", 1)):
        with contextlib.suppress(KeyError, ValueError):
            return float(headers[name]) / per_second
    return None


async def _converse(session: aiohttp.ClientSession, target: Target, recording: Recording) -> None:
    async with session.ws_connect(target.socket_url, headers=target.headers, compress=0, max_msg_size=0) as socket:
        await socket.send_json({"type": "speak", **target.body(recording.request)})
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                recording.receive(message.data)
            elif not _heed(recording, json.loads(message.data)):
                return
    if socket.close_code == TRY_AGAIN_LATER:
        recording.fail(Failure.REFUSED, "the server closed the WebSocket: try again later (1013)")
    else:
        recording.fail(Failure.BROKEN_BODY, f"the WebSocket was closed with {socket.close_code} before the audio ended")


def _heed(recording: Recording, event: Mapping[str, Any]) -> bool:
    """Take one JSON message of the WebSocket; False if it is the last one."""
    match event.get("type"):
        case "started":
            recording.status = 200
            recording.request_id = event.get("request_id")
            recording.body = PcmBody(PcmLayout(int(event["sample_rate"]), int(event["channels"])))
        case "done":
            recording.check_complete()
        case "error":
            refused = event["error"].get("code") == "rate_limit_exceeded"
            kind = Failure.REFUSED if refused else Failure.BROKEN_BODY if recording.chunks else Failure.HTTP
            recording.fail(kind, str(event["error"].get("message")))
    return event.get("type") not in ("done", "error")


def error_message(body: bytes) -> str:
    """The message in OpenAI's error envelope, else the beginning of the body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:MAX_ERROR_BYTES].decode(errors="replace")


async def check_reachable(session: aiohttp.ClientSession, target: Target) -> None:
    """Raises aiohttp.ClientError or TimeoutError unless something answers HTTP, with whatever status."""
    async with session.get(target.base_url, timeout=aiohttp.ClientTimeout(total=10), allow_redirects=False):
        pass
