"""Codec decoder on a talker's device. The decoder keeps the state of each stream in a slot and works asynchronously."""

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

CODE_RING = 2048  # frames of codes per slot; half may wait for decoding, and older frames may be needed again
Prepare = Callable[[Callable[[], None]], None]
"""Compiles all kernels that some work launches, by running the work without the launches."""


class DecodeCall(ABC):
    """Handle of a decode call that may still be running."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether `result` returns immediately."""

    @abstractmethod
    def result(self) -> list[Pcm | EngineError]:
        """Wait for the call and return the samples or the error of each stream, in order. May be called only once."""


class SlotDecoder(ABC):
    """Decoder that stores the states of its streams."""

    num_slots: int
    precision: str  # name of the number format
    reach: int  # number of earlier frames that affect the next sample

    @classmethod
    @abstractmethod
    def load(
        cls, directory: Path, backend: type[Backend], *, num_slots: int, device: torch.device, prepare: Prepare,
        report: Callable[[str], None],
    ) -> "SlotDecoder":  # fmt: skip
        """Load a checkpoint's `speech_tokenizer` folder. Raises CheckpointError. `report` receives the precision.

        `backend` belongs to the same entry of `BACKENDS`. `prepare` receives all GPU work before the first launch.
        """

    @staticmethod
    @abstractmethod
    def gpu_bytes(config: DecoderConfig, *, num_weights: int, num_slots: int, within_reach: int) -> int:
        """Return the bytes of GPU memory that the decoder needs. `within_reach` bytes are available to the process."""

    @staticmethod
    @abstractmethod
    def state_bytes(config: DecoderConfig) -> int:
        """Return the approximate bytes of one stream's state."""

    @property
    @abstractmethod
    def repaired(self) -> int:
        """Number of streams so far that reached NaN or infinity and were decoded in float32 from there on."""

    @abstractmethod
    def largest_batch(self, frames: int) -> int:
        """Return the maximum number of streams in a call of `frames` frames."""

    @abstractmethod
    def begin(self, slot: int, state: DecoderState | None = None) -> None:
        """Start a new stream in a slot, or continue a stream from `state`."""

    @abstractmethod
    def state(self, slot: int) -> DecoderState:
        """Return a slot's state after all previous calls. On a GPU the state may not be computed yet."""

    @abstractmethod
    def write(self, slots: Sequence[int], positions: Sequence[int], codes: Tensor) -> None:
        """Store the frame at `position` of each slot: codes [slots, groups], on any device."""

    @abstractmethod
    def decode(self, slots: Sequence[int], frames: int) -> DecodeCall:
        """Decode the next `frames` (an entry of GPU_RAMP) of each slot. The caller trims samples after the end."""

    @abstractmethod
    def barrier(self) -> None:
        """Make the caller's next work on the device wait for all previous calls."""


class PlainSlots(SlotDecoder):
    """Slots for any `Backend`: for CPUs, and for shapes that the kernels of `TritonSlots` do not support."""

    def __init__(self, decoder: CodecDecoder, *, num_slots: int) -> None:
        self.num_slots = num_slots
        self.precision = decoder.precision
        self.reach = decoder.config.reach
        self._decoder = decoder
        self._states: dict[int, DecoderState] = {}
        self._codes: dict[int, list[Frame]] = {}  # frames that are not decoded yet

    @classmethod
    def load(
        cls, directory: Path, backend: type[Backend], *, num_slots: int, device: torch.device, prepare: Prepare,
        report: Callable[[str], None],
    ) -> "PlainSlots":  # fmt: skip
        return cls(CodecDecoder(backend.load(directory, device=device)), num_slots=num_slots)

    @staticmethod
    def gpu_bytes(config: DecoderConfig, *, num_weights: int, num_slots: int, within_reach: int) -> int:
        """Return the bytes for weights, counted twice because layers with few channels have two copies, and states."""
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
                continue  # the state already includes this frame
            assert position == self._states[slot].position + len(self._codes[slot])
            self._codes[slot].append(frame)

    def decode(self, slots: Sequence[int], frames: int) -> DecodeCall:
        try:
            return _FinishedCall(list(self._decode(slots, frames)))
        except EngineError as error:
            if len(slots) == 1:
                return _FinishedCall([error])
        # Decode each slot separately, to find the slot whose frames raise.
        return _FinishedCall([pcm for slot in slots for pcm in self.decode([slot], frames).result()])

    def barrier(self) -> None:
        """Do nothing, because calls are synchronous."""

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
