"""Parallel upload of weights from checkpoint files to a device."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from deployments.errors import CheckpointError

_PART_BYTES = 4 << 20
_THREADS = 8
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Part:
    """A byte range of a file, and the memory that receives it."""

    path: Path
    start: int
    target: Tensor  # [bytes] uint8


def upload(names: Mapping[Path, Iterable[str]], device: torch.device) -> dict[str, Tensor]:
    """Return the named tensors of each file on `device` in their stored dtype. Raises CheckpointError on a read error.

    Several threads read into pinned memory while earlier parts are being copied. A single thread copying from a
    memory-mapped file would be limited by page faults, so the threads read with `preadv` instead.
    """
    tensors: dict[str, Tensor] = {}
    parts: list[_Part] = []
    for path, tensor_names in names.items():
        header, first = _read_header(path)
        for name in tensor_names:
            shape, dtype = header[name]["shape"], _TYPES[header[name]["dtype"]]
            tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            parts += _cut(path, first + header[name]["data_offsets"][0], tensors[name].view(-1).view(torch.uint8))
    waiting: SimpleQueue[_Part | None] = SimpleQueue()
    for part in parts:
        waiting.put(part)
    for _ in range(_THREADS):
        waiting.put(None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # queued kernels may still read the old contents of the allocated memory
    with ThreadPoolExecutor(_THREADS) as threads:
        for copied in [threads.submit(_copy, waiting, device) for _ in range(_THREADS)]:
            copied.result()
    return tensors


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return each tensor's entry in a safetensors header by name, and the file offset of the tensor data."""
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
    """Copy parts until the queue returns None. Read one part while the previous part is being copied."""
    slots = [_Pinned(device), _Pinned(device)]
    number = 0
    while (part := waiting.get()) is not None:
        slots[number % 2].send(part)
        number += 1
    for slot in slots:
        slot.wait()


class _Pinned:
    """Pinned memory for one part, and the stream that copies the part to the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._memory = torch.empty(_PART_BYTES, dtype=torch.uint8, pin_memory=self._on_gpu)
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    def send(self, part: _Part) -> None:
        """Read a part, and start copying it to the device."""
        self.wait()
        source = self._memory[: len(part.target)]
        _read(part, source.numpy().data)
        with torch.cuda.stream(self._stream):
            part.target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Wait until the previous part is on the device."""
        if self._stream is not None:
            self._stream.synchronize()


def _read(part: _Part, memory: memoryview) -> None:
    try:
        with part.path.open("rb", buffering=0) as file:
            read = 0
            while read < len(memory):
                count = os.preadv(file.fileno(), [memory[read:]], part.start + read)
                if not count:
                    raise CheckpointError(f"cannot read {part.path}: the file is truncated")
                read += count
    except OSError as error:
        raise CheckpointError(f"cannot read {part.path}: {error}") from error
