"""Streaming state of the codec decoder: an immutable value per stream, in its own memory or in memory that processes
share.
"""

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_CELLS = 4096  # only used ones take memory
_ALIGNMENT = 64


class Cell:
    """The place of a state in shared memory. It is free again once no reference to this object is left."""

    __slots__ = ("_free", "number")

    def __init__(self, number: int, free: list[int]) -> None:
        self.number, self._free = number, free

    def __del__(self) -> None:
        self._free.append(self.number)


@dataclass(frozen=True, slots=True)
class DecoderState:
    """The decoder's memory of one stream: last input rows of its convolutions, last keys and values.

    Tensors have the same shapes from the first frame to the last and are never written in place: a state can be kept,
    shared and decoded from again.
    """

    position: int  # frames decoded so far
    tensors: tuple[Tensor, ...]  # empty if they are in a cell
    cell: Cell | None = field(default=None, repr=False, compare=False)


class SharedStates:
    """States of one decoder in an anonymous file (/dev/shm has 64 MB in a container), mapped by several processes."""

    def __init__(self, like: DecoderState, descriptor: int) -> None:
        """`like` has the shapes; the file of `descriptor` is extended to hold all cells."""
        self._layout, size = [], 0
        for tensor in like.tensors:
            self._layout.append((size, tensor.nbytes, tensor.dtype, tensor.shape))
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(descriptor, _CELLS * self._size)
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, _CELLS * self._size), dtype=torch.uint8)
        self._free = list(reversed(range(_CELLS)))  # the cell used last, whose memory is resident, goes first

    def acquire(self) -> Cell:
        """A free cell, which the caller holds from now on. Raises MemoryError."""
        if not self._free:
            raise MemoryError(f"{_CELLS} states of streams are held")
        return Cell(self._free.pop(), self._free)

    def read(self, number: int) -> tuple[Tensor, ...]:
        """The tensors of a cell."""
        start = number * self._size
        return tuple(
            self._bytes[start + offset : start + offset + size].view(dtype).view(shape)
            for offset, size, dtype, shape in self._layout
        )

    def write(self, number: int, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors of a state into a cell."""
        for stored, tensor in zip(self.read(number), tensors, strict=True):
            stored.copy_(tensor)
