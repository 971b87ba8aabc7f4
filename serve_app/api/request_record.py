"""Record of one request, with its caller, outcome and usage counts, but without the text."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import quote

from deployments.protocol import FinishReason, Marks, ModelInfo, PcmChunk
from serve_app.api.headers import MODEL_HEADER, SEED_HEADER, VOICE_HEADER
from serve_app.api.voice_source import ClonedVoice
from serve_app.speech.segments import Utterance

Entry = dict[str, Any]  # a line of a request file: `entry_of` and `story_of` of the extension `records`

LEFT, CANCELLED = "client left", "cancelled"
LINES = "talkray_requests_"  # prefix of the files that contain one line per request
OLDER_FILES = 3  # rotated files of each ingress replica, from .1 (newest) to .3
HAND_ON_S = 0.5  # delay before writing the line of a finished request
_MOST_IN_TRAIL = 64  # a book has thousands of segments, each with several replicas


@dataclass(slots=True)
class Usage:
    """A stream's identity, set by `RequestRecord.note_speech`, and its counts, updated by `add` for each chunk."""

    input_tokens: int = 0
    frames: int = 0
    samples: int = 0
    first_audio_ns: int | None = None  # from time.time_ns()
    finish_reason: FinishReason | None = None
    marks: Marks = ()  # of the first audio, if requests are timed; later segments have separate marks
    tells_timing: bool = False  # whether the response has a Server-Timing header
    seed: int | None = None  # the seed that was used
    model: str | None = None  # name of the request's model
    voice: str | None = None  # name or id of the request's voice
    trail: Marks = ()  # trails of all chunks; see PcmChunk
    left_out: Counter[str] = field(default_factory=Counter)  # text skipped in a socket's turn, by kind; see SpokenText

    @property
    def tokens(self) -> dict[str, int]:
        """Token counts for the response. One output token is one codec frame."""
        inputs, outputs = self.input_tokens, self.frames
        return {"input_tokens": inputs, "output_tokens": outputs, "total_tokens": inputs + outputs}

    @property
    def answer(self) -> dict[str, object]:
        """Values reported in responses so that the speech can be reproduced."""
        unread = [{"what": kind, "count": count} for kind, count in self.left_out.items()]
        answer = {"seed": self.seed, "model": self.model, "voice": self.voice, "left_out": unread or None}
        return {name: value for name, value in answer.items() if value is not None}

    def headers(self) -> dict[str, str]:
        named = {"seed": SEED_HEADER, "model": MODEL_HEADER, "voice": VOICE_HEADER}
        return {named[name]: quote(str(value), safe=" /(),:") for name, value in self.answer.items()}

    def add(self, chunk: PcmChunk) -> None:
        self.input_tokens = chunk.num_text_tokens
        self.frames += len(chunk.codes)
        self.samples += chunk.num_samples
        if chunk.pcm and self.first_audio_ns is None:
            self.first_audio_ns = time.time_ns()
        self.finish_reason = chunk.finish_reason
        self.marks = self.marks or chunk.marks
        self.seed = self.seed if chunk.seed is None else chunk.seed
        self._follow(chunk.trail)

    def another(self, seed: int) -> "Usage":
        """Create the usage record for another attempt at the same speech."""
        return Usage(seed=seed, model=self.model, voice=self.voice, tells_timing=self.tells_timing)

    def become(self, other: "Usage") -> None:
        """Replace all values with those of another attempt at the same speech."""
        for attribute in fields(other):
            setattr(self, attribute.name, getattr(other, attribute.name))

    def include(self, other: "Usage") -> None:
        """Add the counts of another finished utterance of the same request."""
        self.first_audio_ns = self.first_audio_ns or other.first_audio_ns
        self.finish_reason = other.finish_reason
        self.input_tokens += other.input_tokens
        self.frames += other.frames
        self.samples += other.samples
        self._follow(other.trail)

    def mark_response(self) -> None:
        """Mark the start of the response if the request is timed."""
        if self.marks:
            self.marks += (("response", time.time_ns()),)

    def _follow(self, trail: Marks) -> None:
        if trail and len(self.trail) < _MOST_IN_TRAIL:
            self.trail += trail


@dataclass(slots=True)
class RequestRecord:
    """Outcome of one request. A request that neither produced speech nor failed is not logged.

    `usage` is updated while the audio is read. `publish` finalizes the record after the last byte: `RequestContext`
    calls it for a request, and `Session` for each turn of a socket, which has its own record. `SegmentMaker` calls
    `end` directly for a job's segments, which are not requests.
    """

    request_id: str
    received_ns: int  # from time.time_ns()
    client: str = "unknown"
    method: str = ""  # WS: a message on a WebSocket
    path: str = ""
    key: str | None = None  # name of the API key
    dialect: str = ""  # empty if the path belongs to no dialect
    characters: int = 0  # length of the text as sent by the client
    trace: dict[str, str] = field(default_factory=dict)  # the request's `traceparent` and `tracestate`
    ended_ns: int = 0  # from time.time_ns(); 0 until the request ends
    samples_per_s: float = 1.0  # of the delivered audio, including the speed
    usage: Usage = field(default_factory=Usage)
    error: str | None = None  # error code, or LEFT
    is_speech: bool = False
    on_end: Callable[["RequestRecord"], None] = lambda record: None  # called when the request ends

    @property
    def is_failure(self) -> bool:
        """Whether the request failed. Requests abandoned or cancelled by the client do not count as failures."""
        return self.error is not None and self.error not in (LEFT, CANCELLED)

    def another(self, request_id: str) -> "RequestRecord":
        """Create the record of the client's next request on the same connection."""
        return replace(self, request_id=request_id, received_ns=time.time_ns(), usage=Usage(), error=None)

    def note_speech(self, utterance: Utterance, info: ModelInfo, *, stored: ClonedVoice | None, speed: float) -> None:
        """Record that synthesis of an utterance, in the `stored` voice if there is one, is about to start."""
        usage, request = self.usage, utterance.synthesis
        usage.model, usage.seed = info.name, request.seed
        usage.voice = request.voice if stored is None else stored.id
        self.samples_per_s = info.sample_rate * speed
        self.is_speech = True

    def publish(self) -> None:
        """End the record if the request produced speech or failed."""
        if self.error or self.usage.finish_reason or self.is_speech:
            self.end()

    def end(self) -> None:
        """Set the end time and pass the record to `on_end`."""
        self.ended_ns = time.time_ns()
        self.on_end(self)


def start_marks(utterance: Utterance, received_ns: int) -> Utterance:
    """Add the first marks, starting at `received_ns` of time.time_ns(). Later stages add marks of their own."""
    return utterance.changed(marks=(("received", received_ns), ("request", time.time_ns())))
