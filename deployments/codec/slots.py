"""The codec decoder on a talker's device. It keeps each stream's state in a slot, and a call may return before it is
done.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.codec.codec_config import MAX_CALL_FRAMES, DecoderConfig
from deployments.codec.decoder import Backend, CodecDecoder, to_pcm16
from deployments.codec.decoder_state import DecoderState
from deployments.errors import EngineError
from deployments.protocol import Frame, Pcm

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
        cls, directory: Path, backend: type[Backend], *, num_slots: int, device: torch.device, prepare: Prepare,
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


class PlainSlots(SlotDecoder):
    """Slots over any `Backend`, for CPUs and for shapes that the kernels of `TritonSlots` do not support."""

    def __init__(self, decoder: CodecDecoder, *, num_slots: int) -> None:
        self.num_slots = num_slots
        self.precision = decoder.precision
        self.reach = decoder.config.reach
        self._decoder = decoder
        self._states: dict[int, DecoderState] = {}
        self._codes: dict[int, list[Frame]] = {}  # frames that the state lacks yet

    @classmethod
    def load(
        cls, directory: Path, backend: type[Backend], *, num_slots: int, device: torch.device, prepare: Prepare,
        report: Callable[[str], None],
    ) -> "PlainSlots":  # fmt: skip
        return cls(CodecDecoder(backend.load(directory, device=device)), num_slots=num_slots)

    @staticmethod
    def gpu_bytes(config: DecoderConfig, *, num_weights: int, num_slots: int, within_reach: int) -> int:
        """Layers of few channels have their weights twice."""
        return 2 * num_weights * torch.float32.itemsize + num_slots * PlainSlots.state_bytes(config)

    @staticmethod
    def state_bytes(config: DecoderConfig) -> int:
        values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.sliding_window * config.head_dim
        return values * torch.float32.itemsize

    @property
    def repaired(self) -> int:
        return self._decoder.repaired

    def largest_batch(self, frames: int) -> int:
        return min(self.num_slots, max(1, MAX_CALL_FRAMES // frames))

    def begin(self, slot: int, state: DecoderState | None = None) -> None:
        self._states[slot] = state or self._decoder.initial_state()
        self._codes[slot] = []

    def state(self, slot: int) -> DecoderState:
        return self._states[slot]

    def write(self, slots: Sequence[int], positions: Sequence[int], codes: Tensor) -> None:
        for slot, position, frame in zip(slots, positions, codes.cpu().numpy(), strict=True):
            if position < self._states[slot].position:
                continue  # the state has it already
            assert position == self._states[slot].position + len(self._codes[slot])
            self._codes[slot].append(frame)

    def decode(self, slots: Sequence[int], frames: int) -> DecodeCall:
        try:
            return _FinishedCall(list(self._decode(slots, frames)))
        except EngineError as error:
            if len(slots) == 1:
                return _FinishedCall([error])
        # One by one, to find the slot whose frames raise.
        return _FinishedCall([pcm for slot in slots for pcm in self.decode([slot], frames).result()])

    def barrier(self) -> None:
        """Calls are over when they return."""

    def _decode(self, slots: Sequence[int], frames: int) -> NDArray[np.int16]:
        written = [self._codes[slot][:frames] for slot in slots]
        padded = [codes + codes[-1:] * (frames - len(codes)) for codes in written]
        codes = torch.from_numpy(np.stack(padded).astype(np.int64))
        audio, states = self._decoder.decode(codes, [self._states[slot] for slot in slots])
        for slot, state in zip(slots, states, strict=True):
            self._states[slot] = state
            del self._codes[slot][:frames]
        return to_pcm16(audio)


class _FinishedCall(DecodeCall):
    done = True

    def __init__(self, pcm: list[Pcm | EngineError]) -> None:
        self._pcm = pcm

    def result(self) -> list[Pcm | EngineError]:
        return self._pcm
