"""Codec decoder: converts frames of codes to samples, for many streams in one call and any number of frames."""

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

# `auto` selects a faster precision if its error is this many dB below the signal, which makes the error inaudible.
MIN_SNR_DB = 35.0
PCM_SCALE = 32767  # libsndfile's 16-bit scale, which users of the official package write files with


class Backend(ABC):
    """Decoder implementation for one kind of device. Threads may share a backend, because calls modify no shared state.

    States contain floats. The caller owns returned samples and lists of states. A backend that overrides `precisions`
    must override `at` too.
    """

    config: DecoderConfig
    device: torch.device
    precision: str  # number format of matrix products
    initial_state: DecoderState

    @abstractmethod
    def __init__(self, folded: FoldedWeights, precision: str = "float32") -> None:
        """Create a backend from weights on the backend's device."""

    @classmethod
    def load(cls, directory: Path, *, device: torch.device, precision: str = "float32") -> Self:
        """Load `directory`, the checkpoint's `speech_tokenizer` folder. Raises CheckpointError."""
        return cls(FoldedWeights.load(directory, device=device), precision)

    @staticmethod
    def precisions(device: torch.device) -> tuple[str, ...]:
        """Return the precisions that are faster than float32 on a device, fastest and most exact first."""
        return ()

    def at(self, precision: str) -> "Backend":
        """Return a backend with the same weights that computes in float32, or in one of `precisions`."""
        return self

    @property
    def advice(self) -> str:
        """Advice on speeding up decoding on this machine; usually empty."""
        return ""

    @abstractmethod
    def decode(self, codes: Tensor, states: Sequence[DecoderState]) -> tuple[Tensor, list[DecoderState]]:
        """Return the samples [B, frames * frame_samples] of codes [B, frames, num_quantizers], and the next states.

        Codes must be in range. Samples are unclipped, and not finite if the states are not finite.
        """

    def recall(
        self, codes: Tensor, states: Sequence[DecoderState], *, followed_by: int
    ) -> tuple[Tensor, list[DecoderState]]:
        """Return the states that `decode` would return, at a lower cost.

        If another call for `followed_by` frames follows, the states may lack parts that the other call does not read.
        Also returns the last tensor computed, [B, ...], which is finite if the states are finite.
        """
        return self.decode(codes, states)


class CodecDecoder:
    """Decoder that repairs overflowing streams in float32. Thread-safe, because the callers keep the states."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.config, self.precision = backend, backend.config, backend.precision
        self.repaired = 0  # number of calls that reached NaN or infinity and were repeated in float32

    @property
    def device(self) -> torch.device:
        return self.backend.device

    @property
    def frame_samples(self) -> int:
        return self.config.frame_samples

    def initial_state(self) -> DecoderState:
        """Return the state of a stream before its first frame. States are immutable, so all streams share this one."""
        return self.backend.initial_state

    @torch.inference_mode()
    def decode(self, codes: Tensor, states: Sequence[DecoderState]) -> tuple[Tensor, list[DecoderState]]:
        """Decode the next frames of each stream.

        `codes` is [B, frames, num_code_groups] int64, one row per state. Returns float32 samples within [-1, 1], [B,
        frames * frame_samples], and the streams' next states. Memory grows with B * frames. Raises EngineError for
        codes outside the codebooks, and for a stream that reaches NaN or infinity even in float32.
        """
        self._check(codes, len(states))
        codes = codes.to(self.device).contiguous()  # kernels require contiguous codes
        audio, after = self.backend.decode(codes, states)
        for row in _not_finite(audio):
            audio[row], after[row] = self._repair(partial(self._float32.decode, codes[row : row + 1]), states[row])
        return audio.clamp_(-1, 1), after

    def state_after(self, codes: Tensor) -> DecoderState:
        """Return a stream's state after its existing frames, `codes` [frames, num_code_groups] int64, without audio.

        This runs the transformer for all frames within reach of the next sample, and the convolutions for one frame.
        """
        codes, state = codes[-self.config.reach :], self.initial_state()
        for size in recall_sizes(len(codes), call_sizes(RECALL_SIZES)):
            left = codes[size:]
            (state,) = self.recall(codes[None, :size], [state], followed_by=len(left))
            codes = left
        return state

    @torch.inference_mode()
    def recall(self, codes: Tensor, states: Sequence[DecoderState], *, followed_by: int = 0) -> list[DecoderState]:
        """Return the states that `decode` would return, at a lower cost, because only the last samples are computed.

        If another call follows for `followed_by` frames, which reach further than the convolutions, no samples are
        computed, and the states keep the old memory of the convolutions.
        """
        self._check(codes, len(states))
        codes = codes.to(self.device).contiguous()  # kernels require contiguous codes
        made, after = self.backend.recall(codes, states, followed_by=followed_by)
        for row in _not_finite(made):
            recall = partial(self._float32.recall, codes[row : row + 1], followed_by=followed_by)
            _, after[row] = self._repair(recall, states[row])
        return after

    @cached_property
    def _float32(self) -> Backend:
        """Backend for repairs. Allocates the float32 weights on first use."""
        return self.backend.at("float32")

    def _repair(
        self, call: Callable[..., tuple[Tensor, list[DecoderState]]], state: DecoderState
    ) -> tuple[Tensor, DecoderState]:
        """Repeat one stream's part of a call in float32, from the finite state before the call."""
        if self.precision == "float32":
            raise EngineError("the codec decoder computed NaN or infinity: the weights or this machine are broken")
        made, (after,) = call(states=[_cast(state, self._float32.initial_state)])
        if _not_finite(made):
            raise EngineError("the codec decoder computed NaN or infinity, also in float32: the weights are broken")
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
    """Measurements of a decoder's calls during startup. Empty if the decoder is not used."""

    largest_batches: dict[int, int] = field(default_factory=dict)  # number of streams, by frames per stream
    seconds_per_frame: float = 0.0  # see DecodeGate


def warm_up(decoder: CodecDecoder, chunk_frames: Iterable[int], max_call_s: float) -> WarmUpResult:
    """Run each call shape once in advance, because the first call of a shape takes longer on both GPUs and CPUs.

    The largest batches are those whose calls take at most `max_call_s`. The cost per frame is the lowest among the
    single-stream calls, because other processes on the machine may be starting at the same time.
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
    """Return the rows of [B, ...] that contain NaN or infinity."""
    return (~made.flatten(1).isfinite().all(dim=1)).nonzero().flatten().tolist()


def _cast(state: DecoderState, like: DecoderState) -> DecoderState:
    """Return `state` with the dtypes of `like`. Values beyond the range of a dtype are clamped."""
    pairs = zip(state.tensors, like.tensors, strict=True)
    return DecoderState(state.position, tuple(_within(tensor, typed.dtype) for tensor, typed in pairs))


def _within(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (tensor.clamp(-largest, largest) if largest < torch.finfo(tensor.dtype).max else tensor).to(dtype)


def to_pcm16(audio: Tensor) -> NDArray[np.int16]:
    """Convert samples within [-1, 1] to int16, rounded to nearest and clipped at full scale."""
    scaled = (audio.float() * PCM_SCALE).round().clamp(-PCM_SCALE - 1, PCM_SCALE)
    return scaled.to(torch.int16).cpu().numpy()


def describe_choice(precision: str, ratio_db: float, failed: str = "") -> str:
    """Return the startup log line that names the chosen precision and those that were not exact enough."""
    line = f"the codec decodes in {precision}"
    if ratio_db < inf:
        line += f", {ratio_db:.1f} dB above its error"
    if failed:
        line += f"; not exact enough on this checkpoint ({MIN_SNR_DB:.0f} dB are):{failed.removeprefix(',')}"
    if ratio_db < MIN_SNR_DB:
        line += "; no arithmetic is: its layers turn the smallest difference into another waveform"
    return line


def snr_db(exact: Tensor, other: Tensor) -> float:
    """Return the ratio of signal power to error power in dB; minus infinity if `other` is not finite."""
    error = (other.double() - exact.double()).square().sum()
    ratio = 10 * torch.log10(exact.double().square().sum() / error)
    return float(ratio) if bool(torch.isfinite(error)) else -inf
