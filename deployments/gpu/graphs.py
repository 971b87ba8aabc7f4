"""Work of a GPU that is captured once and replayed, and pinned memory for the small writes before each replay."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WARM_UP_RUNS = 2
_STAGED_ROWS = 256

T = TypeVar("T")


class Graphs:
    """Captured GPU work by key, in one memory pool. Work without a capture, as on a CPU, runs directly."""

    def __init__(self, cuda_stream: torch.cuda.Stream | None = None) -> None:
        """Work is captured on `cuda_stream`, by default one of its own: captured kernels keep its priority."""
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        self._cuda_stream = cuda_stream
        self.num_eager = 0

    @torch.inference_mode()
    def capture(self, key: Hashable, work: Callable[[], T]) -> T:
        """Capture `work`, which has to read and write static tensors only; each replay writes its result."""
        side = self._cuda_stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._cuda_stream):
            result = work()
        self._graphs[key] = graph
        return result

    def replay(self, key: Hashable) -> None:
        self._graphs[key].replay()

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Replay the work that was captured under `key`; without a capture run `work`, and count that."""
        if key in self._graphs:
            self.replay(key)
            return
        self.num_eager += 1
        work()


def buckets(largest: int, sizes: Iterable[int]) -> list[int]:
    """The sizes of batches that work is captured for: `sizes` below the largest, and that one."""
    return [size for size in sizes if size < largest] + [largest]


@dataclass(frozen=True, slots=True)
class Staged:
    """A row to fill and then to copy: the same memory as an array and as a tensor."""

    values: NDArray[np.int32]
    tensor: Tensor


class Staging:
    """A ring of pinned rows of host memory, from which small writes to the GPU start without waiting for it.

    A half is used again once all copies out of it are known to be done. `next_row` blocks only if the GPU is half a
    ring (hundreds of copies) behind.
    """

    def __init__(self, width: int, *, device: torch.device, rows: int = _STAGED_ROWS) -> None:
        self._pinned = device.type == "cuda"
        memory = torch.zeros((rows, width), dtype=torch.int32, pin_memory=self._pinned)
        self._rows = [Staged(row.numpy(), row) for row in memory]
        self._half, self._next = rows // 2, 0
        self._left: list[torch.cuda.Event | None] = [None, None]  # the copies out of a half that was left end before it

    def next_row(self) -> Staged:
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
