"""The codec decoder: frames of codes become samples, any number of frames at a time, many streams in one call."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.codec.codec_config import DecoderConfig
from deployments.codec.decoder_state import DecoderState
from deployments.codec.fold import FoldedWeights
from deployments.codec.plan import CALL_FRAMES, MAX_BATCH_FRAMES, MAX_BATCH_SIZE, RECALL_SIZES, call_sizes, recall_sizes
from deployments.errors import EngineError

# A faster precision is taken if its error is this many dB below the signal, because such an error is inaudible.
MIN_SNR_DB = 35.0
PCM_SCALE = 32767  # libsndfile's for 16 bits, through which the official package's users write their files


class Backend(ABC):
    """Decodes frames of streams. Threads share it: a call changes only the states that it returns.

    States are of floats; samples and lists of states belong to the caller. A backend that overrides `precisions`
    overrides `at` too.
    """

    config: DecoderConfig
    device: torch.device
    precision: str  # type in which matrix products are computed
    initial_state: DecoderState

    @abstractmethod
    def __init__(self, folded: FoldedWeights, precision: str = "float32") -> None:
        """The weights are on the backend's device."""

    @classmethod
    def load(cls, directory: Path, *, device: torch.device, precision: str = "float32") -> Self:
        """Loads `directory`, the checkpoint's `speech_tokenizer` folder. Raises CheckpointError."""
        return cls(FoldedWeights.load(directory, device=device), precision)

    @staticmethod
    def precisions(device: torch.device) -> tuple[str, ...]:
        """Precisions that are faster than float32 on a device, the fastest and most exact first."""
        return ()

    def at(self, precision: str) -> "Backend":
        """A backend with the same weights that computes in float32, or in one of `precisions`."""
        return self

    @property
    def advice(self) -> str:
        """Advice that would make it faster on this machine; usually empty."""
        return ""

    @abstractmethod
    def decode(self, codes: Tensor, states: Sequence[DecoderState]) -> tuple[Tensor, list[DecoderState]]:
        """Samples [B, frames * frame_samples] of codes [B, frames, num_quantizers] in range, and the states after them.

        Samples are not bounded, and not finite where the states are not.
        """

    def recall(
        self, codes: Tensor, states: Sequence[DecoderState], *, followed_by: int
    ) -> tuple[Tensor, list[DecoderState]]:
        """The states that `decode` would return, or the parts of them that matter if another `followed_by` frames
        follow.

        Also the last tensor computed for them, [B, ...], which is finite where the states are.
        """
        return self.decode(codes, states)


class CodecDecoder:
    """A loaded decoder. Several threads may call it: the callers keep the states."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.config, self.precision = backend, backend.config, backend.precision
        self.repaired = 0  # calls of a stream that came to NaN or infinity, and were made again in float32

    @property
    def device(self) -> torch.device:
        return self.backend.device

    @property
    def frame_samples(self) -> int:
        return self.config.frame_samples

    def initial_state(self) -> DecoderState:
        """State of a stream before its first frame. States are immutable, so streams share this one."""
        return self.backend.initial_state

    @torch.inference_mode()
    def decode(self, codes: Tensor, states: Sequence[DecoderState]) -> tuple[Tensor, list[DecoderState]]:
        """Decode the next frames of each stream.

        `codes` is [B, frames, num_code_groups] int64, one row per state. Returns float32 samples within [-1, 1], [B,
        frames * frame_samples], and the streams' next states. Memory grows with B * frames. Raises EngineError for
        codes outside the codebooks, and for a stream that reaches NaN or infinity even in float32.
        """
        self._check(codes, len(states))
        codes = codes.to(self.device).contiguous()  # kernels read them without strides
        audio, after = self.backend.decode(codes, states)
        for row in _not_finite(audio):
            audio[row], after[row] = self._repair(partial(self._float32.decode, codes[row : row + 1]), states[row])
        return audio.clamp_(-1, 1), after

    def state_after(self, codes: Tensor) -> DecoderState:
        """The state of a stream after its frames so far, `codes` [frames, num_code_groups] int64, without their audio.

        Costs the frames within reach of the next sample in the transformer, and one frame in the convolutions.
        """
        codes, state = codes[-self.config.reach :], self.initial_state()
        for size in recall_sizes(len(codes), call_sizes(RECALL_SIZES)):
            left = codes[size:]
            (state,) = self.recall(codes[None, :size], [state], followed_by=len(left))
            codes = left
        return state

    @torch.inference_mode()
    def recall(self, codes: Tensor, states: Sequence[DecoderState], *, followed_by: int = 0) -> list[DecoderState]:
        """The states that `decode` would return, at a lower cost: only the last samples are made.

        If another call for `followed_by` frames follows, and these reach further than the convolutions, no samples are
        made, and the states keep the old memory of the convolutions.
        """
        self._check(codes, len(states))
        codes = codes.to(self.device).contiguous()  # kernels read them without strides
        made, after = self.backend.recall(codes, states, followed_by=followed_by)
        for row in _not_finite(made):
            recall = partial(self._float32.recall, codes[row : row + 1], followed_by=followed_by)
            _, after[row] = self._repair(recall, states[row])
        return after

    @cached_property
    def _float32(self) -> Backend:
        """Takes memory for the float32 weights once a stream needs them."""
        return self.backend.at("float32")

    def _repair(
        self, call: Callable[..., tuple[Tensor, list[DecoderState]]], state: DecoderState
    ) -> tuple[Tensor, DecoderState]:
        """A stream's part of a call in float32, from the state before it, which is finite."""
        if self.precision == "float32":
            raise EngineError("the codec decoder came to NaN or infinity: the weights or this machine are broken")
        made, (after,) = call(states=[_cast(state, self._float32.initial_state)])
        if _not_finite(made):
            raise EngineError("the codec decoder came to NaN or infinity, also in float32: the weights are broken")
        self.repaired += 1
        return made, _cast(after, self.initial_state())

    def _check(self, codes: Tensor, num_streams: int) -> None:
        assert codes.dim() == 3, codes.shape
        assert codes.shape[0] == num_streams, (codes.shape, num_streams)
        assert codes.shape[1] > 0, codes.shape
        if codes.shape[2] != self.config.num_quantizers:
            raise EngineError(f"a frame has {codes.shape[2]} codes, the codec takes {self.config.num_quantizers}")
        lowest, highest = (int(bound) for bound in codes.aminmax())
        if lowest < 0 or highest >= self.config.codebook_size:
            raise EngineError(f"codes {lowest} to {highest} are not within 0 to {self.config.codebook_size - 1}")


@dataclass(frozen=True, slots=True)
class WarmUpResult:
    """Measurements of a decoder's calls at the start; empty if there were none."""

    largest_batches: dict[int, int] = field(default_factory=dict)  # number of streams, by frames of each
    seconds_per_frame: float = 0.0  # as in DecodeGate


def warm_up(decoder: CodecDecoder, chunk_frames: Iterable[int], max_call_s: float) -> WarmUpResult:
    """Run every later call once, because the first call of a shape takes longer, on a GPU and on a CPU.

    The largest batches are those whose calls take no longer than `max_call_s`. The cost of a frame is the lowest over
    the calls for one stream, because other processes start on the machine as well.
    """
    sizes, state = call_sizes(chunk_frames), decoder.initial_state()
    codes = torch.zeros((MAX_BATCH_SIZE, max(RECALL_SIZES), decoder.config.num_quantizers), dtype=torch.long)
    for size in call_sizes((*sizes, *RECALL_SIZES)):
        decoder.recall(codes[:1, :size], [state])
    largest, seconds_per_frame = dict[int, int](), inf
    for size in sizes:
        most = min(MAX_BATCH_SIZE, max(1, MAX_BATCH_FRAMES // size))
        batch, seconds = 1, 0.0
        while batch == 1 or (batch <= most and 2 * seconds <= max_call_s):
            decoder.decode(codes[:batch, :size], [state] * batch)
            started_s = time.monotonic()
            decoder.decode(codes[:batch, :size], [state] * batch)
            seconds = time.monotonic() - started_s
            if batch == 1:
                seconds_per_frame = min(seconds_per_frame, seconds / (size + CALL_FRAMES))
            largest[size] = batch
            batch *= 2
    return WarmUpResult(largest, seconds_per_frame)


def _not_finite(made: Tensor) -> list[int]:
    """Rows of [B, ...] that hold NaN or infinity."""
    return (~made.flatten(1).isfinite().all(dim=1)).nonzero().flatten().tolist()


def _cast(state: DecoderState, like: DecoderState) -> DecoderState:
    """`state` in the types of `like`; a value that is too large for a type becomes its largest one."""
    pairs = zip(state.tensors, like.tensors, strict=True)
    return DecoderState(state.position, tuple(_within(tensor, typed.dtype) for tensor, typed in pairs))


def _within(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (tensor.clamp(-largest, largest) if largest < torch.finfo(tensor.dtype).max else tensor).to(dtype)


def to_pcm16(audio: Tensor) -> NDArray[np.int16]:
    """Samples within [-1, 1] as int16, rounded to nearest and clipped at full scale."""
    scaled = (audio.float() * PCM_SCALE).round().clamp(-PCM_SCALE - 1, PCM_SCALE)
    return scaled.to(torch.int16).cpu().numpy()


def describe_choice(precision: str, noise_db: float, failed: str = "") -> str:
    """The start-up line about the chosen precision, and about precisions that were not exact enough."""
    line = f"the codec decodes in {precision}"
    if noise_db < inf:
        line += f", {noise_db:.1f} dB above its error"
    if failed:
        line += f"; not exact enough on this checkpoint ({MIN_SNR_DB:.0f} dB are):{failed.removeprefix(',')}"
    if noise_db < MIN_SNR_DB:
        line += "; no arithmetic is: its layers turn the smallest difference into another waveform"
    return line


def snr_db(exact: Tensor, other: Tensor) -> float:
    """Power of the signal over that of the error; minus infinity where `other` is not finite."""
    error = (other.double() - exact.double()).square().sum()
    ratio = 10 * torch.log10(exact.double().square().sum() / error)
    return float(ratio) if bool(torch.isfinite(error)) else -inf
