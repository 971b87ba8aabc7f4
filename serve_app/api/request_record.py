"""The record of one request: its caller and outcome, without the text; and the counts of its stream."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import quote

from deployments.protocol import FinishReason, Marks, ModelInfo, PcmChunk
from serve_app.api.headers import MODEL_HEADER, SEED_HEADER, VOICE_HEADER
from serve_app.speech.segments import Utterance

Entry = dict[str, Any]  # a line of a request file: `entry_of` and `story_of` of the extension `records`

LEFT, CANCELLED = "client left", "cancelled"
LINES = "talkray_requests_"  # begins the names of the files with a line for each request
OLDER_FILES = 3  # of each ingress replica, renamed to end with .1 (the newest) to .3
HAND_ON_S = 0.5  # after a request has ended, its line is written
_MOST_IN_TRAIL = 64  # a book has thousands of segments, each with its replicas


@dataclass(slots=True)
class Usage:
    """The identity of a stream, and its counts so far.

    Only its own methods write it: `begin` for each utterance, `add` for each chunk.
    """

    input_tokens: int = 0
    frames: int = 0
    samples: int = 0
    first_audio_ns: int | None = None  # of time.time_ns()
    finish_reason: FinishReason | None = None
    marks: Marks = ()  # of its first audio, if requests are timed; later segments have their own
    tells_timing: bool = False  # whether the answer has a Server-Timing header
    seed: int | None = None  # with which it is spoken
    model: str | None = None  # of the request
    voice: str | None = None  # of the request
    trail: Marks = ()  # as in PcmChunk, of all chunks
    left_out: Counter[str] = field(default_factory=Counter)  # of a socket's turn, as in SpokenText

    @property
    def tokens(self) -> dict[str, int]:
        """The counts that answers report; an output token is one codec frame."""
        inputs, outputs = self.input_tokens, self.frames
        return {"input_tokens": inputs, "output_tokens": outputs, "total_tokens": inputs + outputs}

    @property
    def answer(self) -> dict[str, object]:
        """The values in responses that reproduce the speech."""
        unread = [{"what": kind, "count": count} for kind, count in self.left_out.items()]
        answer = {"seed": self.seed, "model": self.model, "voice": self.voice, "left_out": unread or None}
        return {name: value for name, value in answer.items() if value is not None}

    def headers(self) -> dict[str, str]:
        named = {"seed": SEED_HEADER, "model": MODEL_HEADER, "voice": VOICE_HEADER}
        return {named[name]: quote(str(value), safe=" /(),:") for name, value in self.answer.items()}

    def begin(self, utterance: Utterance, info: ModelInfo, voice_id: str | None, *, tells_timing: bool) -> None:
        """Note an utterance that is about to be spoken, by the stored voice `voice_id` if there is one."""
        self.model = info.name
        self.voice = voice_id or utterance.synthesis.voice
        self.seed = utterance.synthesis.seed
        self.tells_timing = tells_timing

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
        """The usage of another attempt at the same speech."""
        return Usage(seed=seed, model=self.model, voice=self.voice, tells_timing=self.tells_timing)

    def become(self, other: "Usage") -> None:
        """Take the values of another attempt at the same speech instead."""
        for attribute in fields(other):
            setattr(self, attribute.name, getattr(other, attribute.name))

    def include(self, other: "Usage") -> None:
        """Add the counts of another utterance of the same request, which has ended."""
        self.first_audio_ns = self.first_audio_ns or other.first_audio_ns
        self.finish_reason = other.finish_reason
        self.input_tokens += other.input_tokens
        self.frames += other.frames
        self.samples += other.samples
        self._follow(other.trail)

    def mark_response(self) -> None:
        """Mark the start of the response, if the request is timed."""
        if self.marks:
            self.marks += (("response", time.time_ns()),)

    def _follow(self, trail: Marks) -> None:
        if trail and len(self.trail) < _MOST_IN_TRAIL:
            self.trail += trail


@dataclass(slots=True)
class RequestRecord:
    """The outcome of one request. A request that neither spoke nor failed gets no line.

    `usage` counts while the audio is read. `publish` closes both after the last byte. `RequestContext` calls it for a
    request, `Session` for a turn of a socket, which has its own record. A job's segment is not a request:
    `SegmentMaker` calls `end`.
    """

    request_id: str
    received_ns: int  # of time.time_ns()
    client: str = "unknown"
    method: str = ""  # WS: a message on a WebSocket
    path: str = ""
    key: str | None = None  # the name of its API key
    dialect: str = ""  # "" if no dialect has its path
    characters: int = 0  # of the text, as the client wrote it
    trace: dict[str, str] = field(default_factory=dict)  # its `traceparent` and `tracestate`
    ended_ns: int = 0  # of time.time_ns(); 0 until its end
    samples_per_s: float = 1.0  # of the audio as it is heard
    usage: Usage = field(default_factory=Usage)
    error: str | None = None  # its code, or LEFT
    is_speech: bool = False
    keep: Callable[["RequestRecord"], None] = lambda record: None  # called at its end

    @property
    def is_failure(self) -> bool:
        """Whether an error, not the client, ended the request."""
        return self.error is not None and self.error not in (LEFT, CANCELLED)

    def another(self, request_id: str) -> "RequestRecord":
        """The record of the same client's next request on the same connection."""
        return replace(self, request_id=request_id, received_ns=time.time_ns(), usage=Usage(), error=None)

    def note_speech(
        self,
        utterance: Utterance,
        info: ModelInfo,
        voice_id: str | None,
        *,
        speed: float,
        tells_timing: bool = False,
    ) -> None:
        """Note that the request is about to be spoken."""
        self.usage.begin(utterance, info, voice_id, tells_timing=tells_timing)
        self.samples_per_s = info.sample_rate * speed
        self.is_speech = True

    def publish(self) -> None:
        """Keep the record in its current state, if the request spoke or failed."""
        if self.error or self.usage.finish_reason or self.is_speech:
            self.end()

    def end(self) -> None:
        """Keep the record in its current state."""
        self.ended_ns = time.time_ns()
        self.keep(self)


def start_marks(utterance: Utterance, received_ns: int) -> Utterance:
    """The utterance with a first mark, at `received_ns` of time.time_ns(). Each later stage then adds its own."""
    return utterance.changed(marks=(("received", received_ns), ("request", time.time_ns())))
