"""Records one request while its audio arrives."""

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
SLOW_LEAD_S = 0.5  # of audio that a slow reader has buffered
TO_SERVER, TO_CLIENT = "to-server", "to-client"
REFUSED_STATUS, TRY_AGAIN_LATER = 429, 1013  # of HTTP, of a WebSocket that is closed


@dataclass(frozen=True, slots=True)
class ServerTiming:
    """The `Server-Timing` header of one answer, which Talkray sends with `api.server_timing: true`.

    Each entry with a `dur` is a stage, in order; `received;desc="..."` is when the server received the request.
    """

    received_s: float | None  # time of day
    stages_s: dict[str, float]


def parse(header: str) -> ServerTiming:
    """Parse a header; skips entries with neither a duration nor a receive time."""
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
    """Seconds of each stage. If the server's clock agrees with ours, also the way there and back, so that all stages
    add up to `ttfb_s`. `sent_at_s`: time of day at which we sent.
    """
    timing = parse(header)
    inside_s = sum(timing.stages_s.values())
    there_s = -1.0 if timing.received_s is None else timing.received_s - sent_at_s
    if not timing.stages_s or not 0 <= there_s <= ttfb_s - inside_s:
        return timing.stages_s
    return {TO_SERVER: there_s, **timing.stages_s, TO_CLIENT: ttfb_s - inside_s - there_s}


DEFAULT_SAMPLE_RATE = 24000  # of OpenAI's response_format pcm


class NotAudioError(Exception):
    """The body is not the requested audio."""


CONTENT_TYPES = ("audio/pcm", "audio/x-pcm", "audio/l16", "audio/raw", "application/octet-stream")


def read_layout(headers: Mapping[str, str]) -> PcmLayout:
    """The sample format of an answer's body, from its headers; raises NotAudioError if it is not PCM.

    The sample rate is the `rate` parameter of the content type, else `x-sample-rate`, else 24 kHz.
    """
    media_type, *rest = headers.get("Content-Type", "application/octet-stream").split(";")
    if media_type.strip().lower() not in CONTENT_TYPES:
        raise NotAudioError(f"asked for pcm, the server answered {media_type.strip()}")
    parameters = {name.strip().lower(): value.strip() for name, _, value in (item.partition("=") for item in rest)}
    rate = parameters.get("rate") or headers.get("X-Sample-Rate") or DEFAULT_SAMPLE_RATE
    return pcm_layout(rate, parameters.get("channels") or 1)


def pcm_layout(rate: object, channels: object) -> PcmLayout:
    """The sample format in the answer. Raises NotAudioError unless both are whole numbers above 0."""
    if not (_COUNT.fullmatch(f"{rate}") and _COUNT.fullmatch(f"{channels}")):
        raise NotAudioError(f"sample rate {rate!r} or number of channels {channels!r} is not a whole number above 0")
    return PcmLayout(int(f"{rate}"), int(f"{channels}"))


async def read_messages(socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[bytes | dict[str, Any]]:
    """Samples and JSON objects until the socket is closed; raises NotAudioError at any other message."""
    async for message in socket:
        if message.type is aiohttp.WSMsgType.BINARY:
            yield message.data
            continue
        event = None
        if message.type is aiohttp.WSMsgType.TEXT:
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(message.data)
        if not isinstance(event, dict):
            raise NotAudioError(f"a message of the server cannot be read: {message.data!r:.200}")
        yield event


class Recording:
    """Records a request in flight: its times and bytes as they arrive. It counts as sent when this is constructed."""

    def __init__(self, request: ScheduledRequest, clock: Clock) -> None:
        self.request = request
        self.clock = clock
        self.chunks: list[tuple[float, int]] = []
        self.trace = Trace(request.index, request.planned_s, clock.now_s(), frames=request.frames, chunks=self.chunks)
        self.trace.kind = request.kind
        self.kept: bytearray | None = None  # the audio, if a caller sets this before
        self._onset: AudibleOnset | None = None
        self._sent_at_s = time.time()

    def begin(self) -> None:
        """The first word is sent now. If a text is written while it is spoken, times count from here."""
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
        """Take a whole WAV file that was just read; raises NotAudioError if it is not a 16-bit WAV file."""
        try:
            with wave.open(io.BytesIO(data)) as file:
                pcm, bits = file.readframes(file.getnframes()), 8 * file.getsampwidth()
                self.trace.layout = pcm_layout(file.getframerate(), file.getnchannels())
        except (wave.Error, EOFError) as error:
            raise NotAudioError(f"asked for a WAV file, and what came is none: {error}") from error
        if bits != 8 * SAMPLE_BYTES:
            raise NotAudioError(f"asked for a WAV file, which came with {bits} bits a sample")
        self.receive(pcm)

    async def read_wav_header(self, content: aiohttp.StreamReader) -> None:
        """Read the header of a streamed WAV file, up to its first sample; raises NotAudioError if it is not one.

        Ignores the sizes in it, because the file is still being made.
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
            raise NotAudioError(f"asked for a WAV file that streams, and its header ended early: {error}") from error
        if layout is None:
            raise NotAudioError("asked for a WAV file that streams, and what came has no header of 16-bit audio")
        self.trace.layout = layout

    async def keep_pace(self) -> None:
        """Wait until all but SLOW_LEAD_S of the received audio has been played, like a reader with a full buffer."""
        layout = self.trace.layout
        if layout is not None and self.chunks:
            played_s = self.chunks[0][0] + self.num_audio_bytes / layout.frame_bytes / layout.sample_rate
            await asyncio.sleep(played_s - SLOW_LEAD_S - self.clock.now_s())

    def check_complete(self) -> None:
        """Raises NotAudioError unless a whole number of samples arrived, at least one."""
        layout = self.trace.layout
        if layout is None or not self.chunks:
            raise NotAudioError(f"the answer ended after {self.trace.num_bytes} bytes without any audio")
        if self.num_audio_bytes % layout.frame_bytes:
            raise NotAudioError(f"the audio ended in the middle of a sample, after {self.num_audio_bytes} bytes")

    def read_server_timing(self, header: str | None) -> None:
        """Record how the server spent the time to its first byte, which has arrived."""
        if header is not None and self.trace.first_byte_s is not None:
            ttfb_s = self.trace.first_byte_s - self.trace.sent_s
            self.trace.server_timing_s = stages(header, sent_at_s=self._sent_at_s, ttfb_s=ttfb_s)

    def fail(self, failure: Failure, error: str) -> None:
        self.trace.failure, self.trace.error = failure, error

    def fail_closed(self, code: int | None, *, before: str) -> None:
        """Record that the server closed the WebSocket with this code, `before` the expected end."""
        if code == TRY_AGAIN_LATER:
            self.trace.status = REFUSED_STATUS
            self.fail(Failure.REFUSED, "the server closed the WebSocket: try again later (1013)")
        else:
            self.fail(Failure.BROKEN_BODY, f"the WebSocket was closed with {code} before {before}")

    def finish(self) -> Trace:
        self.trace.finished_s = self.clock.now_s()
        return self.trace
