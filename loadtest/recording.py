"""What is written down of one request while its audio streams in."""

import time
from collections.abc import Mapping

from loadtest.arrivals import ScheduledRequest
from loadtest.playback import AudibleOnset
from loadtest.server_timing import stages
from loadtest.traces import Clock, Failure, PcmLayout, Trace

DEFAULT_SAMPLE_RATE = 24000  # of response_format pcm, says OpenAI


class NotAudioError(Exception):
    """The body is not the audio that was asked for."""


CONTENT_TYPES = ("audio/pcm", "audio/x-pcm", "audio/l16", "audio/raw", "application/octet-stream")


def read_layout(headers: Mapping[str, str]) -> PcmLayout:
    """How the body of an answer with these headers is to be read; raises NotAudioError if it is not PCM.

    The sample rate is the `rate` parameter of the content type, else `x-sample-rate`, else 24 kHz.
    """
    media_type, *rest = headers.get("Content-Type", "application/octet-stream").split(";")
    if media_type.strip().lower() not in CONTENT_TYPES:
        raise NotAudioError(f"asked for pcm, the server answered {media_type.strip()}")
    parameters = {name.strip().lower(): value.strip() for name, _, value in (item.partition("=") for item in rest)}
    rate = parameters.get("rate") or headers.get("X-Sample-Rate") or str(DEFAULT_SAMPLE_RATE)
    channels = parameters.get("channels") or "1"
    if not (rate.isdecimal() and channels.isdecimal() and int(rate) and int(channels)):
        raise NotAudioError(f"sample rate {rate!r} or number of channels {channels!r} is not a number above 0")
    return PcmLayout(int(rate), int(channels))


class Recording:
    """A request on its way: takes times and bytes as they come. Counts as sent from its construction on."""

    def __init__(self, request: ScheduledRequest, clock: Clock) -> None:
        self.request = request
        self.clock = clock
        self.chunks: list[tuple[float, int]] = []
        self.trace = Trace(request.index, request.planned_s, clock.now_s(), frames=request.frames, chunks=self.chunks)
        self._onset: AudibleOnset | None = None
        self._sent_at_s = time.time()

    def begin(self) -> None:
        """The first word leaves now: times count from here, where a text is written while it is spoken."""
        self.trace.first_word_s = self.clock.now_s()

    @property
    def num_audio_bytes(self) -> int:
        return self.chunks[-1][1] if self.chunks else 0

    def receive(self, data: bytes) -> None:
        """Take bytes of the body that were read just now."""
        trace, now_s = self.trace, self.clock.now_s()
        trace.first_byte_s = now_s if trace.first_byte_s is None else trace.first_byte_s
        trace.num_bytes += len(data)
        if data and trace.layout:
            self.chunks.append((now_s, trace.num_bytes))
            self._onset = self._onset or AudibleOnset(trace.layout.sample_rate, trace.layout.channels)
            self._onset.feed(data)
            trace.audible_sample = self._onset.sample

    def check_complete(self) -> None:
        """Raises NotAudioError unless what came is a whole number of samples, and at least one."""
        layout = self.trace.layout
        if layout is None or not self.chunks:
            raise NotAudioError(f"the answer ended after {self.trace.num_bytes} bytes without any audio")
        if self.num_audio_bytes % layout.frame_bytes:
            raise NotAudioError(f"the audio ended in the middle of a sample, after {self.num_audio_bytes} bytes")

    def read_server_timing(self, header: str | None) -> None:
        """Take how the server spent the time to its first byte, which is there."""
        if header is not None and self.trace.first_byte_s is not None:
            ttfb_s = self.trace.first_byte_s - self.trace.sent_s
            self.trace.server_timing_s = stages(header, sent_at_s=self._sent_at_s, ttfb_s=ttfb_s)

    def fail(self, failure: Failure, error: str) -> None:
        """Say why the request did not succeed."""
        self.trace.failure, self.trace.error = failure, error

    def finish(self) -> Trace:
        """The finished request; its end is now."""
        self.trace.finished_s = self.clock.now_s()
        return self.trace
