"""Record one request while its audio arrives."""

import asyncio
import contextlib
import io
import json
import re
import struct
import time
import wave
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadtest.arrivals import ScheduledRequest
from loadtest.playback import AudibleOnset
from loadtest.traces import SAMPLE_BYTES, Clock, Failure, PcmLayout, Trace

_ENTRY = re.compile(r"\s*([\w-]+)((?:\s*;\s*\w+\s*=\s*(?:\"[^\"]*\"|[^;,]*))*)\s*(?:,|$)")
_COUNT = re.compile(r"0*[1-9]\d{0,8}")
_PARAMETER = re.compile(r";\s*(\w+)\s*=\s*\"?([^\";,]*)\"?")
SLOW_LEAD_S = 0.5  # buffer of a slow reader, in seconds of audio
TO_SERVER, TO_CLIENT = "to-server", "to-client"
REFUSED_STATUS, TRY_AGAIN_LATER = 429, 1013  # HTTP status, and WebSocket close code


@dataclass(frozen=True, slots=True)
class ServerTiming:
    """`Server-Timing` header of one response. Talkray sends the header if `api.server_timing` is true.

    The entries with a `dur` are the stages, in order. The entry `received;desc="..."` has the time at which the server
    received the request.
    """

    received_s: float | None  # Unix time
    stages_s: dict[str, float]


def parse(header: str) -> ServerTiming:
    """Parse a header. Skips entries that have neither a duration nor a receive time."""
    received_s, stages_s = None, {}
    for name, rest in _ENTRY.findall(header):
        parameters = dict(_PARAMETER.findall(rest))
        try:
            if name == "received":
                received_s = float(parameters["desc"])
            else:
                stages_s[name] = float(parameters["dur"]) / 1000
        except (KeyError, ValueError):
            continue
    return ServerTiming(received_s, stages_s)


def stages(header: str, *, sent_at_s: float, ttfb_s: float) -> dict[str, float]:
    """Return the seconds of each stage. `sent_at_s` is the Unix time of the send. If both clocks agree, the result
    includes the network time in both directions, and the stages add up to `ttfb_s`.
    """
    timing = parse(header)
    inside_s = sum(timing.stages_s.values())
    there_s = -1.0 if timing.received_s is None else timing.received_s - sent_at_s
    if not timing.stages_s or not 0 <= there_s <= ttfb_s - inside_s:
        return timing.stages_s
    return {TO_SERVER: there_s, **timing.stages_s, TO_CLIENT: ttfb_s - inside_s - there_s}


DEFAULT_SAMPLE_RATE = 24000  # for OpenAI's response_format pcm


class NotAudioError(Exception):
    """Raised if a body is not the requested audio."""


CONTENT_TYPES = ("audio/pcm", "audio/x-pcm", "audio/l16", "audio/raw", "application/octet-stream")


def read_layout(headers: Mapping[str, str]) -> PcmLayout:
    """Return the sample format of a response body from its headers. Raises `NotAudioError` if the body is not PCM.

    The sample rate is the `rate` parameter of the content type, `x-sample-rate`, or 24 kHz.
    """
    media_type, *rest = headers.get("Content-Type", "application/octet-stream").split(";")
    if media_type.strip().lower() not in CONTENT_TYPES:
        raise NotAudioError(f"requested pcm, but the server returned {media_type.strip()}")
    parameters = {name.strip().lower(): value.strip() for name, _, value in (item.partition("=") for item in rest)}
    rate = parameters.get("rate") or headers.get("X-Sample-Rate") or DEFAULT_SAMPLE_RATE
    return pcm_layout(rate, parameters.get("channels") or 1)


def pcm_layout(rate: object, channels: object) -> PcmLayout:
    """Return the sample format. Raises `NotAudioError` unless both values are positive integers."""
    if not (_COUNT.fullmatch(f"{rate}") and _COUNT.fullmatch(f"{channels}")):
        raise NotAudioError(f"sample rate {rate!r} or number of channels {channels!r} is not a whole number above 0")
    return PcmLayout(int(f"{rate}"), int(f"{channels}"))


async def read_messages(socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[bytes | dict[str, Any]]:
    """Yield samples and JSON objects until the WebSocket closes. Raises `NotAudioError` for other messages."""
    async for message in socket:
        if message.type is aiohttp.WSMsgType.BINARY:
            yield message.data
            continue
        event = None
        if message.type is aiohttp.WSMsgType.TEXT:
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(message.data)
        if not isinstance(event, dict):
            raise NotAudioError(f"a message from the server is invalid: {message.data!r:.200}")
        yield event


class Recording:
    """Recording of a request in flight. The request counts as sent when the recording is created."""

    def __init__(self, request: ScheduledRequest, clock: Clock) -> None:
        self.request = request
        self.clock = clock
        self.chunks: list[tuple[float, int]] = []
        self.trace = Trace(request.index, request.planned_s, clock.now_s(), frames=request.frames, chunks=self.chunks)
        self.trace.kind = request.kind
        self.kept: bytearray | None = None  # the received audio, if the caller has set a buffer
        self._onset: AudibleOnset | None = None
        self._sent_at_s = time.time()

    def begin(self) -> None:
        """Record when the first word was sent. Latencies of live text are measured from then on."""
        self.trace.first_word_s = self.clock.now_s()

    @property
    def num_audio_bytes(self) -> int:
        return self.chunks[-1][1] if self.chunks else 0

    def receive(self, data: bytes) -> None:
        trace, now_s = self.trace, self.clock.now_s()
        trace.first_byte_s = now_s if trace.first_byte_s is None else trace.first_byte_s
        trace.num_bytes += len(data)
        if self.kept is not None:
            self.kept += data
        if data and trace.layout:
            self.chunks.append((now_s, trace.num_bytes))
            self._onset = self._onset or AudibleOnset(trace.layout.sample_rate, trace.layout.channels)
            self._onset.feed(data)
            trace.audible_sample = self._onset.sample

    def receive_file(self, data: bytes) -> None:
        """Record a complete WAV file. Raises `NotAudioError` if it is not a 16-bit WAV file."""
        try:
            with wave.open(io.BytesIO(data)) as file:
                pcm, bits = file.readframes(file.getnframes()), 8 * file.getsampwidth()
                self.trace.layout = pcm_layout(file.getframerate(), file.getnchannels())
        except (wave.Error, EOFError) as error:
            raise NotAudioError(f"requested a WAV file, but the body is not a WAV file: {error}") from error
        if bits != 8 * SAMPLE_BYTES:
            raise NotAudioError(f"requested 16-bit WAV, but the file has {bits} bits per sample")
        self.receive(pcm)

    async def read_wav_header(self, content: aiohttp.StreamReader) -> None:
        """Read the header of a streamed WAV file, up to the first sample. Raises `NotAudioError` if it is invalid.
        Ignores the sizes in the header, because the server has not finished the file.
        """
        try:
            riff = await content.readexactly(12)
            layout = None
            while riff[:4] == b"RIFF" and (chunk := await content.readexactly(8))[:4] != b"data":
                said = await content.readexactly(int.from_bytes(chunk[4:], "little"))
                if chunk[:4] == b"fmt ":
                    _, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", said)
                    layout = pcm_layout(rate, channels) if bits == 8 * SAMPLE_BYTES else None
        except (asyncio.IncompleteReadError, struct.error) as error:
            raise NotAudioError(f"requested a streamed WAV file, but its header is incomplete: {error}") from error
        if layout is None:
            raise NotAudioError("requested a streamed WAV file, but the body has no 16-bit WAV header")
        self.trace.layout = layout

    async def keep_pace(self) -> None:
        """Wait until all but SLOW_LEAD_S of the received audio has been played, like a reader with a full buffer."""
        layout = self.trace.layout
        if layout is not None and self.chunks:
            played_s = self.chunks[0][0] + self.num_audio_bytes / layout.frame_bytes / layout.sample_rate
            await asyncio.sleep(played_s - SLOW_LEAD_S - self.clock.now_s())

    def check_complete(self) -> None:
        """Raise `NotAudioError` unless a positive number of complete samples arrived."""
        layout = self.trace.layout
        if layout is None or not self.chunks:
            raise NotAudioError(f"the response ended after {self.trace.num_bytes} bytes without audio")
        if self.num_audio_bytes % layout.frame_bytes:
            raise NotAudioError(f"the audio ended in the middle of a sample, after {self.num_audio_bytes} bytes")

    def read_server_timing(self, header: str | None) -> None:
        """Record how long the server spent in each stage before the first byte."""
        if header is not None and self.trace.first_byte_s is not None:
            ttfb_s = self.trace.first_byte_s - self.trace.sent_s
            self.trace.server_timing_s = stages(header, sent_at_s=self._sent_at_s, ttfb_s=ttfb_s)

    def fail(self, failure: Failure, error: str) -> None:
        self.trace.failure, self.trace.error = failure, error

    def fail_closed(self, code: int | None, *, before: str) -> None:
        """Record that the server closed the WebSocket with `code` before the expected end."""
        if code == TRY_AGAIN_LATER:
            self.trace.status = REFUSED_STATUS
            self.fail(Failure.REFUSED, "the server closed the WebSocket: try again later (1013)")
        else:
            self.fail(Failure.BROKEN_BODY, f"the WebSocket was closed with {code} before {before}")

    def finish(self) -> Trace:
        self.trace.finished_s = self.clock.now_s()
        return self.trace
