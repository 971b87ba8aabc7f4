"""Capture and replay of CUDA graphs, and pinned memory for small writes that precede each replay."""

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
    """CUDA graphs by key, in one memory pool. Work that has no captured graph (for example, on a CPU) runs eagerly."""

    def __init__(self, cuda_stream: torch.cuda.Stream | None = None) -> None:
        """Capture on `cuda_stream`, or on a new stream by default. Captured kernels keep the stream's priority."""
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        self._cuda_stream = cuda_stream
        self.num_eager = 0

    @torch.inference_mode()
    def capture(self, key: Hashable, work: Callable[[], T]) -> T:
        """Capture `work`, which must only read and write static tensors. Each replay overwrites the returned result."""
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
        """Replay the graph captured under `key`. If there is none, run `work` eagerly and count it in `num_eager`."""
        if key in self._graphs:
            self.replay(key)
            return
        self.num_eager += 1
        work()


def buckets(largest: int, sizes: Iterable[int]) -> list[int]:
    """Return the batch sizes to capture: all `sizes` below `largest`, and `largest` itself."""
    return [size for size in sizes if size < largest] + [largest]


@dataclass(frozen=True, slots=True)
class Staged:
    """A row of staging memory, as an array to fill and a tensor to copy from. Both share the same memory."""

    values: NDArray[np.int32]
    tensor: Tensor


class Staging:
    """Ring buffer of pinned host memory for small writes to the GPU that do not block the CPU.

    Each half of the buffer is reused only after all copies from it have completed. `next_row` blocks only if the GPU
    is half a buffer (hundreds of copies) behind.
    """

    def __init__(self, width: int, *, device: torch.device, rows: int = _STAGED_ROWS) -> None:
        self._pinned = device.type == "cuda"
        memory = torch.zeros((rows, width), dtype=torch.int32, pin_memory=self._pinned)
        self._rows = [Staged(row.numpy(), row) for row in memory]
        self._half, self._next = rows // 2, 0
        self._left: list[torch.cuda.Event | None] = [None, None]  # recorded after all copies from that half

    def next_row(self) -> Staged:
        """Return the next row, which still holds its old contents."""
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
