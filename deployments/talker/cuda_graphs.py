"""Recorded GPU work by key. What was not recorded runs operation by operation, and is counted."""

from collections.abc import Callable, Hashable

import torch

_WARM_UP_RUNS = 2


class Graphs:
    """CUDA graphs of one stream in one memory pool. Without captures everything runs as it is: so on a CPU."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        self.num_eager = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    @torch.inference_mode()
    def capture(self, key: Hashable, work: Callable[[], None]) -> None:
        """Record `work`, which has to read and write static tensors only."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        self._graphs[key] = graph

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Replay what was recorded under `key`, or else do `work`."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        self.num_eager += 1
        work()
