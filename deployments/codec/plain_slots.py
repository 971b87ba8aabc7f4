"""Slots for any `Backend`: for CPUs, and for shapes that the kernels of `TritonSlots` do not support."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.codec.codec_config import MAX_CALL_FRAMES, DecoderConfig
from deployments.codec.decoder import Backend, CodecDecoder, to_pcm16
from deployments.codec.decoder_state import DecoderState
from deployments.codec.slots import DecodeCall, Precompile, SlotDecoder
from deployments.errors import EngineError
from deployments.protocol import Frame, Pcm


class PlainSlots(SlotDecoder):
    """Slots that keep their states and codes, and decode synchronously."""

    def __init__(self, decoder: CodecDecoder, *, num_slots: int) -> None:
        self.num_slots = num_slots
        self.precision = decoder.precision
        self.reach = decoder.config.reach
        self._decoder = decoder
        self._states: dict[int, DecoderState] = {}
        self._codes: dict[int, list[Frame]] = {}  # frames that have not been decoded yet

    @classmethod
    def load(
        cls, directory: Path, backend: type[Backend], *, num_slots: int, device: torch.device, precompile: Precompile,
        report: Callable[[str], None],
    ) -> "PlainSlots":  # fmt: skip
        return cls(CodecDecoder(backend.load(directory, device=device)), num_slots=num_slots)

    @staticmethod
    def gpu_bytes(config: DecoderConfig, *, num_weights: int, num_slots: int, within_reach: int) -> int:
        """Return the bytes of states and weights. Weights count twice, as layers with few channels have two copies."""
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

    def start_slot(self, slot: int, state: DecoderState | None = None) -> None:
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

    def recall(self, slot: int, frames: int) -> None:
        codes = torch.from_numpy(np.stack(self._codes[slot][:frames]).astype(np.int64))
        (self._states[slot],) = self._decoder.recall(codes[None], [self._states[slot]])
        del self._codes[slot][:frames]

    def decode(self, slots: Sequence[int], frames: int) -> DecodeCall:
        try:
            return _FinishedCall(list(self._decode(slots, frames)))
        except EngineError as error:
            if len(slots) == 1:
                return _FinishedCall([error])
        # Decode each slot separately to find the one whose frames raise an error.
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
