"""Help for a GPU: recorded work, pinned memory for small writes, and weights that arrive in many parts at once."""

import json
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.errors import CheckpointError

_WARM_UP_RUNS = 2
_STAGED_ROWS = 256
_PART_BYTES = 4 << 20
_THREADS = 8
_SYSFS = Path("/sys")
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

T = TypeVar("T")


class Graphs:
    """Recorded GPU work by key, in one memory pool. Without captures everything runs as it is: so on a CPU."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """`stream` is where work is recorded, by default one for that: recorded kernels keep its priority."""
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        self._stream = stream
        self.num_eager = 0

    @torch.inference_mode()
    def capture(self, key: Hashable, work: Callable[[], T]) -> T:
        """Record `work`, which has to read and write static tensors only; each replay writes its result."""
        side = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = work()
        self._graphs[key] = graph
        return result

    def replay(self, key: Hashable) -> None:
        self._graphs[key].replay()

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Replay the work that was recorded under `key`; without a recording do `work`, which is counted."""
        if key in self._graphs:
            self.replay(key)
            return
        self.num_eager += 1
        work()


def use_cpus_near(device: torch.device) -> str | None:
    """Have this thread, and threads that it starts, run on the GPU's own NUMA node; returns its name, None where there
    is one node only.

    Memory that is pinned afterwards lies there too. (PyTorch's `torch.numa` does this for processes of torchrun only.)
    Only CPUs that the process may use count; where none of them is near, or the kernel does not say which are, nothing
    changes.
    """
    allowed = os.sched_getaffinity(0)
    address = pci_address(torch.cuda.get_device_properties(device))
    try:
        listed = (_SYSFS / "bus/pci/devices" / address / "local_cpulist").read_text(encoding="ascii").strip()
    except OSError:  # a container may hide it
        return None
    near = allowed & set(_cpus(listed))
    if not near or near == allowed:
        return None
    os.sched_setaffinity(0, near)
    return f"{len(near)} of {len(allowed)} CPUs, those near GPU {address}"


def pci_address(properties: Any) -> str:
    """The PCI address of a GPU with these properties."""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _cpus(listed: str) -> Iterator[int]:
    """The numbers in a list of the kernel's form: 0-15,64-79."""
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def buckets(largest: int, sizes: Iterable[int]) -> list[int]:
    """The sizes of batches that work is recorded for: `sizes` below the largest, and that one."""
    return [size for size in sizes if size < largest] + [largest]


@dataclass(frozen=True, slots=True)
class Staged:
    """A row to fill and then to copy: the same memory as an array and as a tensor."""

    values: NDArray[np.int32]
    tensor: Tensor


class Staging:
    """Host memory from which small writes to the GPU start, without ever waiting for it: a ring of pinned rows.

    A half is used again once all copies out of it are known to be done.

    Taking a row waits only where the GPU is half a ring, hundreds of copies, late.
    """

    def __init__(self, width: int, *, device: torch.device, rows: int = _STAGED_ROWS) -> None:
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


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of a file, and where they go."""

    path: Path
    start: int
    target: Tensor  # [bytes] uint8


def upload(names: Mapping[Path, Iterable[str]], device: torch.device) -> dict[str, Tensor]:
    """The named tensors of each file on `device`, as they are stored; raises CheckpointError for unreadable files.

    Several threads read into pinned memory while earlier parts are on their way. One thread that copies out of a mapped
    file is bound by page faults; these read with `preadv`, past the mapping.
    """
    tensors: dict[str, Tensor] = {}
    parts: list[_Part] = []
    for path, wanted in names.items():
        header, first = _read_header(path)
        for name in wanted:
            shape, dtype = header[name]["shape"], _TYPES[header[name]["dtype"]]
            tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            parts += _cut(path, first + header[name]["data_offsets"][0], tensors[name].view(-1).view(torch.uint8))
    waiting: SimpleQueue[_Part | None] = SimpleQueue()
    for part in parts:
        waiting.put(part)
    for _ in range(_THREADS):
        waiting.put(None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # no work may still read the old contents of these tensors' memory
    with ThreadPoolExecutor(_THREADS) as threads:
        for copied in [threads.submit(_copy, waiting, device) for _ in range(_THREADS)]:
            copied.result()
    return tensors


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """What safetensors says of each tensor by its name, and where in the file the first of them begins."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return json.loads(file.read(size)), 8 + size
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _cut(path: Path, start: int, target: Tensor) -> Iterator[_Part]:
    for at in range(0, len(target), _PART_BYTES):
        yield _Part(path, start + at, target[at : at + _PART_BYTES])


def _copy(waiting: "SimpleQueue[_Part | None]", device: torch.device) -> None:
    """Copy parts until there is None, reading one while the one before is on its way."""
    slots = [_Pinned(device), _Pinned(device)]
    number = 0
    while (part := waiting.get()) is not None:
        slots[number % 2].send(part)
        number += 1
    for slot in slots:
        slot.wait()


class _Pinned:
    """Pinned memory for one part, and whether it has left."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._memory = torch.empty(_PART_BYTES, dtype=torch.uint8, pin_memory=self._on_gpu)
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    def send(self, part: _Part) -> None:
        """Read a part, and have it copied."""
        self.wait()
        source = self._memory[: len(part.target)]
        _read(part, source.numpy().data)
        with torch.cuda.stream(self._stream):
            part.target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Return once the last part has arrived."""
        if self._stream is not None:
            self._stream.synchronize()


def _read(part: _Part, memory: memoryview) -> None:
    try:
        with part.path.open("rb", buffering=0) as file:
            read = 0
            while read < len(memory):
                count = os.preadv(file.fileno(), [memory[read:]], part.start + read)
                if not count:
                    raise CheckpointError(f"cannot read {part.path}: it ends too early")
                read += count
    except OSError as error:
        raise CheckpointError(f"cannot read {part.path}: {error}") from error
