"""Messages between the talker replica and its engine process over a socket pair, except `EngineStart`, an argument.

This module does not import torch, because the replica does not need it.
"""

import pickle
import struct
import sys
from dataclasses import dataclass, field

from deployments.config import Strict, TalkerConfig
from deployments.protocol import FrameChunk, ModelInfo, SynthesisRequest
from deployments.recording_cache import Lookups

_LENGTH = struct.Struct("<I")
EARLY_ENGINE = "TALKRAY_EARLY_ENGINE"  # environment variable: path of the socket that offers an engine started early


class EngineStart(Strict):
    """The model and settings for an engine process to load, passed as JSON on its command line."""

    model: str
    config: TalkerConfig
    makes_audio: bool  # False if all audio is decoded elsewhere


def engine_command(start: EngineStart, descriptor: int) -> list[str]:
    """Return the command of an engine process whose socket is `descriptor`."""
    module = "deployments.talker.process.engine_process"
    return [sys.executable, "-m", module, str(descriptor), start.model_dump_json()]


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request, with the sequence id assigned by the replica."""

    sequence_id: int
    request: SynthesisRequest


@dataclass(frozen=True, slots=True)
class Append:
    """The next part of a live request's text."""

    sequence_id: int
    text: str
    is_last: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """Request to stop a sequence because its reader has closed the stream."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Request to drop data for deleted voices. See `RecordingCache.forget`."""

    voices: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Loading:
    """A stage of the engine's start has begun."""

    stage: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine accepts requests from now on."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's current load, and counters."""

    num_running: int = 0
    num_waiting: int = 0
    kv_used_ratio: float = 0.0
    speakers: Lookups = field(default_factory=Lookups)  # lookups of speaker vectors since the last report
    references: Lookups = field(default_factory=Lookups)  # lookups of recordings' codes since the last report
    num_background: int = 0  # job sequences, not included in the numbers above
    repaired: int = 0  # total number of streams whose audio reached NaN or infinity and was decoded again


@dataclass(frozen=True, slots=True)
class Produced:
    """New frames by sequence id, with the engine's load after the step."""

    chunks: tuple[tuple[int, FrameChunk], ...]
    step_s: float  # duration of the step; 0 if it made no frames
    load: EngineLoad


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat of the engine process, also sent during long steps."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Error that ends a request, or the engine if there is no id."""

    sequence_id: int | None
    error: Exception


@dataclass(frozen=True, slots=True)
class HasForgotten:
    """Reply to a `Forget` with the number of results dropped."""

    num_results: int


Command = Submit | Append | Abort | Forget
EngineEvent = Loading | Ready | Produced | Heartbeat | RequestFailed | HasForgotten


def encode(message: Command | EngineEvent) -> bytes:
    """Serialize a message with a length prefix. Pickle is safe, because both ends run the same code on one machine."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Assembles messages from received bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Command | EngineEvent]:
        self._buffer += data
        messages = []
        while (message := self._next_message()) is not None:
            messages.append(message)
        return messages

    @property
    def is_inside(self) -> bool:
        """Whether part of a message has arrived."""
        return bool(self._buffer)

    def _next_message(self) -> Command | EngineEvent | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message: Command | EngineEvent = pickle.loads(bytes(self._buffer[_LENGTH.size : end]))
        del self._buffer[:end]
        return message
