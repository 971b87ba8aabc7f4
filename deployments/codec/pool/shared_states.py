"""Decoder states in memory that the processes of a pool share."""

import mmap
import os
from collections.abc import Iterable

import torch
from torch import Tensor

from deployments.codec.decoder_state import Cell, DecoderState

_CELLS = 4096  # only cells in use take up memory
_ALIGNMENT = 64


class SharedStates:
    """States of one decoder in an anonymous file that several processes map. /dev/shm has only 64 MB in containers."""

    def __init__(self, like: DecoderState, descriptor: int) -> None:
        """Create cells with the shapes of `like`. Extends the file of `descriptor` to hold all cells."""
        self._layout, size = [], 0
        for tensor in like.tensors:
            self._layout.append((size, tensor.nbytes, tensor.dtype, tensor.shape))
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(descriptor, _CELLS * self._size)
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, _CELLS * self._size), dtype=torch.uint8)
        self._free = list(reversed(range(_CELLS)))  # reuse the last freed cell first, because its memory is resident

    def acquire(self) -> Cell:
        """Return a free cell. Raises MemoryError if all cells are in use."""
        if not self._free:
            raise MemoryError(f"all {_CELLS} cells for states of streams are in use")
        return Cell(self._free.pop(), self._free)

    def read(self, number: int) -> tuple[Tensor, ...]:
        """Return the tensors in a cell, without copying."""
        start = number * self._size
        return tuple(
            self._bytes[start + offset : start + offset + size].view(dtype).view(shape)
            for offset, size, dtype, shape in self._layout
        )

    def write(self, number: int, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors of a state into a cell."""
        for stored, tensor in zip(self.read(number), tensors, strict=True):
            stored.copy_(tensor)
