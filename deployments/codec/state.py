"""Streaming state of the codec decoder: an immutable value per stream, stacked for a batched call and split again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecoderState:
    """What the decoder remembers of one stream: contexts and tails of its convolutions, last keys and values.

    Tensors have the same shapes from the first frame to the last and are never written in place: a state can be kept,
    shared and decoded from again.
    """

    position: int  # frames decoded so far
    tensors: tuple[Tensor, ...]


@dataclass(slots=True)
class BatchState:
    """States of the streams of one call. Every layer reads its slot and puts the tensor for the next call there."""

    positions: Tensor  # [B] int64, frames decoded before this call
    tensors: list[Tensor]  # each [B, *shape of one stream]


class StateLayout:
    """Shapes of one stream's tensors. Each streaming layer reserves its slot when it is constructed."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def reserve(self, *shape: int) -> int:
        """Index in `DecoderState.tensors` of a new tensor of this shape."""
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def initial(self, *, device: torch.device | str, dtype: torch.dtype) -> DecoderState:
        """State of a stream before its first frame: silence everywhere."""
        return DecoderState(0, tuple(torch.zeros(shape, device=device, dtype=dtype) for shape in self.shapes))


def stack(states: Sequence[DecoderState]) -> BatchState:
    """One batch of the streams, in their order."""
    positions = torch.tensor([state.position for state in states], device=states[0].tensors[0].device)
    if len(states) == 1:
        return BatchState(positions, [tensor.unsqueeze(0) for tensor in states[0].tensors])
    return BatchState(positions, [torch.stack(slot) for slot in zip(*(state.tensors for state in states), strict=True)])


def split(batch: BatchState, positions: Sequence[int]) -> list[DecoderState]:
    """State of each stream after a call, at its new position. Each owns its memory and keeps no neighbour's alive."""
    if len(positions) == 1:
        return [DecoderState(positions[0], tuple(tensor[0] for tensor in batch.tensors))]
    return [
        DecoderState(position, tuple(tensor[row].clone() for tensor in batch.tensors))
        for row, position in enumerate(positions)
    ]
