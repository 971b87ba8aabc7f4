"""A single decoder call for chunks of several streams, in a thread or in a worker process."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deployments.codec.decoder import CodecDecoder, to_pcm16
from deployments.codec.decoder_state import DecoderState
from deployments.errors import CodecLost, EngineError
from deployments.protocol import Codes


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """The next frames to decode for one stream."""

    codes: Codes  # [frames, num_code_groups]
    state: DecoderState
    deadline_s: float  # time at which the listener needs the audio, by time.monotonic()
    state_only: bool = False  # only compute the state, because the talker's GPU made the audio
    followed_by: int = 0  # frames in this stream's later silent tasks
    stalled_s: float = 0.0  # seconds of silence that the listener has already heard

    @property
    def shape(self) -> tuple[int, bool]:
        """Number of frames and `state_only`, which are the same for all tasks in a call."""
        return len(self.codes), self.state_only

    def stall_s(self, now_s: float) -> float:
        """Return the listener's total silence in seconds if the task finishes at `now_s`; 0.0 if it is in time."""
        return self.stalled_s + now_s - self.deadline_s if now_s > self.deadline_s else 0.0


@dataclass(frozen=True, slots=True)
class Decoded:
    """A task's audio, and the state of its stream after the task."""

    pcm: NDArray[np.int16]  # [frames * frame_samples]; empty for a silent task
    state: DecoderState


def decode_batch(decoder: CodecDecoder, tasks: Sequence[DecodeTask]) -> list[Decoded | Exception]:
    """Return the outcome of each task, in order. Makes one call per shape. A failure affects only one task."""
    outcomes: dict[int, Decoded | Exception] = {}
    for shape in sorted({task.shape for task in tasks}):
        rows = [row for row, task in enumerate(tasks) if task.shape == shape]
        outcomes |= zip(rows, _decode_group(decoder, [tasks[row] for row in rows]), strict=True)
    return [outcomes[row] for row in range(len(tasks))]


def _decode_group(decoder: CodecDecoder, tasks: list[DecodeTask]) -> list[Decoded | Exception]:
    try:
        return list(_decode_stacked(decoder, tasks))
    except (EngineError, MemoryError, RuntimeError, ValueError) as error:
        if len(tasks) > 1:  # find the failing task
            return [outcome for task in tasks for outcome in _decode_group(decoder, [task])]
        if isinstance(error, EngineError):
            return [error]
        return [out_of_memory(error) or EngineError(f"the codec decoder failed: {error}")]


def _decode_stacked(decoder: CodecDecoder, tasks: list[DecodeTask]) -> list[Decoded]:
    codes = torch.from_numpy(np.stack([task.codes for task in tasks]).astype(np.int64))
    states = [task.state for task in tasks]
    if tasks[0].state_only:
        nothing = np.zeros(0, np.int16)
        followed_by = min(task.followed_by for task in tasks)
        return [Decoded(nothing, state) for state in decoder.recall(codes, states, followed_by=followed_by)]
    audio, states = decoder.decode(codes, states)
    return [Decoded(pcm, state) for pcm, state in zip(to_pcm16(audio), states, strict=True)]


def out_of_memory(error: Exception) -> CodecLost | None:
    """Return CodecLost if the replica is out of memory, because another replica may have enough; None otherwise."""
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    return CodecLost("this codec replica is out of memory") if is_memory else None
