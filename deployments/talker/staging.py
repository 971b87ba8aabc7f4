"""Host memory from which small writes to the GPU start, without ever waiting for the GPU."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ROWS = 256


@dataclass(frozen=True, slots=True)
class Staged:
    """A row to fill and then to copy: the same memory as an array and as a tensor."""

    values: NDArray[np.int32]
    tensor: Tensor


class Staging:
    """A ring of pinned rows. A half is used again once all copies out of it are known to be done.

    Taking a row waits only where the GPU is half a ring, hundreds of copies, behind.
    """

    def __init__(self, width: int, *, device: torch.device, rows: int = _ROWS) -> None:
        self._pinned = device.type == "cuda"
        memory = torch.zeros((rows, width), dtype=torch.int32, pin_memory=self._pinned)
        self._rows = [Staged(row.numpy(), row) for row in memory]
        self._half, self._next = rows // 2, 0
        self._left: list[torch.cuda.Event | None] = [None, None]  # recorded when a half was left

    def take(self) -> Staged:
        """The next row; its old contents are still in it."""
        if self._next % self._half == 0:
            self._enter(self._next // self._half)
        staged = self._rows[self._next]
        self._next = (self._next + 1) % len(self._rows)
        return staged

    def _enter(self, half: int) -> None:
        if not self._pinned:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._left[1 - half] = event
        waiting = self._left[half]
        if waiting is not None:
            waiting.synchronize()
