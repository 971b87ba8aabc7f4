"""Streaming state of the codec decoder: an immutable value per stream."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecoderState:
    """What the decoder remembers of one stream: last input rows of its convolutions, last keys and values.

    Tensors have the same shapes from the first frame to the last and are never written in place: a state can be kept,
    shared and decoded from again.
    """

    position: int  # frames decoded so far
    tensors: tuple[Tensor, ...]
