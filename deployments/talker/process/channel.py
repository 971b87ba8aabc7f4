"""Messages between the talker replica and its engine process: over a socket pair, but for `EngineStart`.

The replica imports no torch, so this file does not either.
"""

import pickle
import struct
from dataclasses import dataclass, field

from deployments.config import Strict, TalkerConfig
from deployments.protocol import FrameChunk, ModelInfo, SynthesisRequest
from deployments.recording_cache import Lookups

_LENGTH = struct.Struct("<I")


class EngineStart(Strict):
    """The model that an engine process loads: an argument of its command line, as JSON."""

    model: str
    config: TalkerConfig
    makes_audio: bool  # False if no stream asks for audio


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request, and the id of its sequence, which the replica chose."""

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
    """The reader of a stream has left."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Stored voices that were deleted: see `ByRecording.forget`."""

    voices: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Loading:
    """A stage of the engine's start."""

    stage: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes requests from now on."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The current work of an engine, and its counts."""

    num_running: int = 0
    num_waiting: int = 0
    kv_used_ratio: float = 0.0
    speakers: Lookups = field(default_factory=Lookups)  # of speaker vectors since the last report
    references: Lookups = field(default_factory=Lookups)  # of codes of recordings since the last report
    num_background: int = 0  # sequences of jobs, which count in neither of the numbers above
    repaired: int = 0  # streams so far whose audio reached NaN or infinity and was made again


@dataclass(frozen=True, slots=True)
class Produced:
    """New frames by sequence id, and the engine's load after the step."""

    chunks: tuple[tuple[int, FrameChunk], ...]
    step_s: float  # duration of the step; 0 if no frame was made
    load: EngineLoad


@dataclass(frozen=True, slots=True)
class Alive:
    """The engine process runs, though a step may take long."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The error of a request, which brings no more frames. Without an id it is the engine's."""

    sequence_id: int | None
    error: Exception


@dataclass(frozen=True, slots=True)
class HasForgotten:
    """The answer to a `Forget`: the number of dropped results."""

    num_results: int


Command = Submit | Append | Abort | Forget
Report = Loading | Ready | Produced | Alive | RequestFailed | HasForgotten


def encode(message: Command | Report) -> bytes:
    """A message with its length in front. Pickle is safe, because both ends run the same code on one machine."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Assembles messages from bytes as they arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Command | Report]:
        self._buffer += data
        messages = []
        while (message := self._next_message()) is not None:
            messages.append(message)
        return messages

    @property
    def is_inside(self) -> bool:
        """Whether a part of a message has arrived."""
        return bool(self._buffer)

    def _next_message(self) -> Command | Report | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message: Command | Report = pickle.loads(bytes(self._buffer[_LENGTH.size : end]))
        del self._buffer[:end]
        return message
