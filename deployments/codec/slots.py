"""The codec decoder on a talker's device. It keeps each stream's state in a slot, and a call may return before it is
done.
"""

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

if TYPE_CHECKING:  # not every kind of slots has one
    from deployments.codec.decoder import Backend

CODE_RING = 2048  # frames whose codes a slot holds: half of them may wait, earlier ones may be needed again
Prepare = Callable[[Callable[[], None]], None]
"""Makes sure that the kernels which some work launches are compiled; runs it without launching them."""


class DecodeCall(ABC):
    """A decode call that may still run."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether `result` returns at once."""

    @abstractmethod
    def result(self) -> list[Pcm | EngineError]:
        """Wait for the samples of each stream of the call, in its order, or its error. Call it once."""


class SlotDecoder(ABC):
    """A decoder that keeps the state of its streams itself."""

    num_slots: int
    precision: str  # its name
    reach: int  # number of earlier frames on which the next sample depends

    @classmethod
    @abstractmethod
    def load(
        cls, directory: Path, backend: "type[Backend]", *, num_slots: int, device: torch.device, prepare: Prepare,
        report: Callable[[str], None],
    ) -> "SlotDecoder":  # fmt: skip
        """Loads a checkpoint's `speech_tokenizer` folder. Raises CheckpointError. `report` gets the precision.

        `backend` is in the same row of `BACKENDS`. `prepare` is given all the work of a GPU before any of it is done.
        """

    @staticmethod
    @abstractmethod
    def gpu_bytes(config: DecoderConfig, *, num_weights: int, num_slots: int, within_reach: int) -> int:
        """Bytes of GPU memory that the decoder will take. `within_reach`: bytes that this process can get."""

    @staticmethod
    @abstractmethod
    def state_bytes(config: DecoderConfig) -> int:
        """Bytes of one stream's state, about."""

    @property
    @abstractmethod
    def repaired(self) -> int:
        """Streams so far that reached NaN or infinity and were decoded in float32 from there on."""

    @abstractmethod
    def largest_batch(self, frames: int) -> int:
        """Streams that one call of `frames` takes."""

    @abstractmethod
    def begin(self, slot: int, state: DecoderState | None = None) -> None:
        """Start a new stream in a slot, or one that continues from a state."""

    @abstractmethod
    def state(self, slot: int) -> DecoderState:
        """A slot's state after the calls made so far; on a GPU, perhaps not computed yet."""

    @abstractmethod
    def write(self, slots: Sequence[int], positions: Sequence[int], codes: Tensor) -> None:
        """Give each slot its frame number `position`: codes [slots, groups], on any device."""

    @abstractmethod
    def decode(self, slots: Sequence[int], frames: int) -> DecodeCall:
        """The next `frames` (of GPU_RAMP) of each slot. The caller cuts off samples after a stream's last frame."""

    @abstractmethod
    def barrier(self) -> None:
        """Make the caller's next work on the device wait for the calls made so far."""
