"""One call of the decoder for chunks of several streams, in a thread or in a process of its own."""

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
    """The next frames of one stream."""

    codes: Codes  # [frames, num_code_groups]
    state: DecoderState
    deadline_s: float  # when its listener needs them, by time.monotonic()
    silent: bool = False  # only the state is wanted: the talker's GPU made the audio
    followed_by: int = 0  # frames of further silent tasks of this stream
    stalled_s: float = 0.0  # silence that its listener has heard so far

    @property
    def shape(self) -> tuple[int, bool]:
        """The shape that the tasks of one call share."""
        return len(self.codes), self.silent

    def stall_s(self, now_s: float) -> float:
        """Total silence that its listener has heard if the task is done only now; 0.0 if it is in time."""
        return self.stalled_s + now_s - self.deadline_s if now_s > self.deadline_s else 0.0


@dataclass(frozen=True, slots=True)
class Decoded:
    """Audio of a task and the state of its stream after it."""

    pcm: NDArray[np.int16]  # [frames * frame_samples]; empty for a silent task
    state: DecoderState


def decode_batch(decoder: CodecDecoder, tasks: Sequence[DecodeTask]) -> list[Decoded | Exception]:
    """Outcome of each task, in their order: one call for each shape, and a bad task fails alone."""
    outcomes: dict[int, Decoded | Exception] = {}
    for shape in sorted({task.shape for task in tasks}):
        rows = [row for row, task in enumerate(tasks) if task.shape == shape]
        outcomes |= zip(rows, _decode_group(decoder, [tasks[row] for row in rows]), strict=True)
    return [outcomes[row] for row in range(len(tasks))]


def _decode_group(decoder: CodecDecoder, tasks: list[DecodeTask]) -> list[Decoded | Exception]:
    try:
        return list(_decode_stacked(decoder, tasks))
    except (EngineError, MemoryError, RuntimeError, ValueError) as error:
        if len(tasks) > 1:  # find the culprit
            return [outcome for task in tasks for outcome in _decode_group(decoder, [task])]
        if isinstance(error, EngineError):
            return [error]
        return [out_of_memory(error) or EngineError(f"the codec decoder failed: {error}")]


def _decode_stacked(decoder: CodecDecoder, tasks: list[DecodeTask]) -> list[Decoded]:
    codes = torch.from_numpy(np.stack([task.codes for task in tasks]).astype(np.int64))
    states = [task.state for task in tasks]
    if tasks[0].silent:
        nothing = np.zeros(0, np.int16)
        followed_by = min(task.followed_by for task in tasks)
        return [Decoded(nothing, state) for state in decoder.recall(codes, states, followed_by=followed_by)]
    audio, states = decoder.decode(codes, states)
    return [Decoded(pcm, state) for pcm, state in zip(to_pcm16(audio), states, strict=True)]


def out_of_memory(error: Exception) -> CodecLost | None:
    """The error of streams for which this replica has no memory: another one may have enough. None for other errors."""
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    return CodecLost("this codec replica is out of memory") if is_memory else None
