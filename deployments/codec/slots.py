"""Codec decoder on a talker's device. The decoder keeps the state of each stream in a slot and works asynchronously."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deployments.codec.codec_config import DecoderConfig
from deployments.codec.decoder_state import DecoderState
from deployments.errors import EngineError
from deployments.protocol import Pcm

if TYPE_CHECKING:  # not all kinds of slots have one
    from deployments.codec.decoder import Backend

CODE_RING = 2048  # frames of codes per slot; half may be waiting to be decoded, and older frames may be needed again
Precompile = Callable[[Callable[[], None]], None]
"""Compiles all kernels that some work launches, by running the work without the launches."""


class DecodeCall(ABC):
    """Handle to a decode call that may still be running."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether `result` returns immediately."""

    @abstractmethod
    def result(self) -> list[Pcm | EngineError]:
        """Wait for the call and return each stream's samples or error, in order. May be called only once."""


class SlotDecoder(ABC):
    """Decoder that stores its streams' states."""

    num_slots: int
    precision: str  # name of the number format
    reach: int  # number of earlier frames that affect the next sample

    @classmethod
    @abstractmethod
    def load(
        cls, directory: Path, backend: "type[Backend]", *, num_slots: int, device: torch.device, precompile: Precompile,
        report: Callable[[str], None],
    ) -> "SlotDecoder":  # fmt: skip
        """Load a checkpoint's `speech_tokenizer` folder. Raises CheckpointError. `report` receives the precision.

        `backend` belongs to the same entry of `BACKENDS`. `precompile` receives all GPU work before the first launch.
        """

    @staticmethod
    @abstractmethod
    def gpu_bytes(config: DecoderConfig, *, num_weights: int, num_slots: int, within_reach: int) -> int:
        """Return the bytes of GPU memory that the decoder needs. The process can use `within_reach` bytes."""

    @staticmethod
    @abstractmethod
    def state_bytes(config: DecoderConfig) -> int:
        """Return the approximate size of one stream's state in bytes."""

    @property
    @abstractmethod
    def repaired(self) -> int:
        """Number of streams that have reached NaN or infinity and were decoded in float32 from then on."""

    @abstractmethod
    def largest_batch(self, frames: int) -> int:
        """Return the maximum number of streams in a call of `frames` frames."""

    @abstractmethod
    def start_slot(self, slot: int, state: DecoderState | None = None) -> None:
        """Start a new stream in a slot, or continue a stream from `state`."""

    @abstractmethod
    def state(self, slot: int) -> DecoderState:
        """Return a slot's state after all previous calls. On a GPU the state may not be computed yet."""

    @abstractmethod
    def write(self, slots: Sequence[int], positions: Sequence[int], codes: Tensor) -> None:
        """Store the frame at `position` of each slot: codes [slots, groups], on any device."""

    @abstractmethod
    def recall(self, slot: int, frames: int) -> None:
        """Compute the state after the slot's next `frames` frames, without samples. On a GPU, does not wait.

        Raises EngineError if the state is not finite and the decoder has noticed it.
        """

    @abstractmethod
    def decode(self, slots: Sequence[int], frames: int) -> DecodeCall:
        """Decode the next `frames` (an entry of GPU_RAMP) of each slot. The caller trims samples after the end."""

    @abstractmethod
    def barrier(self) -> None:
        """Make the caller's subsequent work on the device wait for all previous calls."""
