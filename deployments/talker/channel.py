"""Messages between the talker replica and its engine process, over a socket pair."""

import pickle
import struct
from dataclasses import dataclass, field

from deployments.audio.recording_cache import Lookups
from deployments.protocol import FrameChunk, GenerateRequest, ModelInfo

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request under a number the replica chose."""

    id: int
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Append:
    """The next part of a live request's text."""

    id: int
    text: str
    is_last: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """The stream's reader has gone."""

    id: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Stored voices that are no more, as `ByRecording.forget` takes them."""

    voices: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Loading:
    """A stage of the engine process before it is ready."""

    stage: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes requests now."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Produced:
    """New frames by request number, and the engine's load after the step that made them."""

    chunks: list[tuple[int, FrameChunk]]
    num_running: int
    num_waiting: int
    step_s: float = 0.0  # duration of the step; 0 where no frame was made
    kv_used_ratio: float = 0.0
    speakers: Lookups = field(default_factory=Lookups)  # vectors of voices to clone, looked up since the last report
    references: Lookups = field(default_factory=Lookups)  # codes of their recordings, looked up since then
    repaired: int = 0  # streams so far whose audio came to NaN or infinity


@dataclass(frozen=True, slots=True)
class Alive:
    """The engine process has not stopped, whatever its step takes."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request that will bring no more frames; without a number, the engine itself."""

    id: int | None
    error: Exception


@dataclass(frozen=True, slots=True)
class HasForgotten:
    """The answer to a `Forget`: how many results there were."""

    num_results: int


Command = Submit | Append | Abort | Forget
Report = Loading | Ready | Produced | Alive | RequestFailed | HasForgotten


def encode(message: Command | Report) -> bytes:
    """A message with its length in front. Both ends are one version of our code on one machine: pickle is safe here."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Bytes as they arrive to whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Command | Report]:
        self._buffer += data
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        return messages

    @property
    def is_inside(self) -> bool:
        """Whether a message has begun to arrive, and not ended."""
        return bool(self._buffer)

    def _take(self) -> Command | Report | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message: Command | Report = pickle.loads(bytes(self._buffer[_LENGTH.size : end]))
        del self._buffer[:end]
        return message
