"""Streaming state of the codec decoder: an immutable value per stream."""

from dataclasses import dataclass, field

from torch import Tensor


class Cell:
    """Slot for one state in shared memory. Deleting the last reference to this object frees the slot."""

    __slots__ = ("_free", "number")

    def __init__(self, number: int, free: list[int]) -> None:
        self.number, self._free = number, free

    def __del__(self) -> None:
        self._free.append(self.number)


@dataclass(frozen=True, slots=True)
class DecoderState:
    """Memory of the decoder for one stream: the last input rows of its convolutions, and its last keys and values.

    Tensors keep the same shapes from the first frame to the last and are never written in place. Callers can therefore
    keep and share a state, and decode from it again.
    """

    position: int  # number of frames already decoded
    tensors: tuple[Tensor, ...]  # empty if the tensors are in a cell
    cell: Cell | None = field(default=None, repr=False, compare=False)
