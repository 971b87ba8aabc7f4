"""Strict reading of safetensors checkpoints: one `model.safetensors`, or an index with shards. Threads copy the weights
to a GPU in parallel.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deployments.errors import CheckpointError
from deployments.weights.store import INDEX_FILE, SINGLE_FILE, read_index

_MAX_SHOWN = 8
_PART_BYTES = 4 << 20
_THREADS = 8
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

T = TypeVar("T")


def tensor_files(directory: Path) -> dict[str, Path]:
    """Return the file that contains each tensor of the checkpoint in `directory`, by tensor name."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        with _opened(single) as file:
            return dict.fromkeys(file.keys(), single)
    if not index.is_file():
        raise CheckpointError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    return {name: directory / file for name, file in read_index(index).items()}


def read_shapes(directory: Path, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor under `prefix`, by its name without the prefix. Reads only the files' headers."""
    return _collect(directory, prefix, lambda file, name: tuple(file.get_slice(name).get_shape()))


def read_tensors(directory: Path, prefix: str = "", *, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Read each tensor under `prefix`, by its name without the prefix. Tensors keep their stored dtype."""
    if torch.device(device).type == "cpu":
        return _collect(directory, prefix, lambda file, name: file.get_tensor(name))
    tensors = upload(_names_by_file(directory, prefix), torch.device(device))
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


class _NoDraws(TorchFunctionMode):
    """Skips random initialization of embeddings, because drawing on the meta device imports a thousand modules."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return None if func is nn.init.normal_ else func(*args, **(kwargs or {}))


@contextmanager
def without_values() -> Iterator[None]:
    """Construct modules in this block on the meta device, without values, for `load_strict`."""
    with torch.device("meta"), _NoDraws():
        yield


def load_strict(
    module: nn.Module,
    directory: Path,
    *,
    prefix: str = "",
    dtype: torch.dtype,
    device: torch.device | str,
    ignore: tuple[str, ...] = (),
) -> None:
    """Fill a module, preferably constructed `without_values`, through `read_strict`. Casts float tensors to `dtype`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    tensors = read_strict(directory, shapes, prefix=prefix, device=device, ignore=ignore)
    module.load_state_dict(
        {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()},
        strict=False,  # `read_strict` has checked the names; tensors in `ignore` may be missing
        assign=True,
    )
    module.requires_grad_(requires_grad=False)


def read_strict(
    directory: Path,
    shapes: dict[str, tuple[int, ...]],
    *,
    prefix: str,
    device: torch.device | str,
    ignore: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Read the tensors under `prefix` and check that their names, without the prefix, and shapes match `shapes`.

    Raises CheckpointError with the name of each missing, unexpected or wrongly shaped tensor before any weight is read.
    `ignore` holds shell patterns for names that may be missing or unexpected.
    """
    problems = list(_differences(shapes, read_shapes(directory, prefix), ignore))
    if problems:
        raise CheckpointError(_describe(directory, prefix, problems))
    tensors = read_tensors(directory, prefix, device=device)
    return {name: tensor for name, tensor in tensors.items() if name in shapes}


def _differences(
    expected: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]], ignore: tuple[str, ...]
) -> Iterator[str]:
    for name in sorted(expected.keys() | stored.keys()):
        if any(fnmatchcase(name, pattern) for pattern in ignore):
            continue
        if name not in stored:
            yield f"{name} is missing"
        elif name not in expected:
            yield f"{name} is unexpected"
        elif expected[name] != stored[name]:
            yield f"{name} has shape {list(stored[name])}, expected {list(expected[name])}"


def _describe(directory: Path, prefix: str, problems: list[str]) -> str:
    if any(".lora_" in problem for problem in problems):
        return f"{directory} holds a LoRA adapter that is not merged: merge it first (PEFT: merge_and_unload)"
    shown = "; ".join(prefix + problem for problem in problems[:_MAX_SHOWN])
    more = f"; and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
    file = directory / (SINGLE_FILE if (directory / SINGLE_FILE).is_file() else INDEX_FILE)
    return f"{file} does not fit the architecture: {shown}{more}"


def _collect(directory: Path, prefix: str, take: Callable[[Any, str], T]) -> dict[str, T]:
    collected: dict[str, T] = {}
    for path, names in _names_by_file(directory, prefix).items():
        with _opened(path) as file:
            collected |= {name.removeprefix(prefix): take(file, name) for name in names}
    return collected


def _names_by_file(directory: Path, prefix: str) -> dict[Path, list[str]]:
    by_file: dict[Path, list[str]] = {}
    for name, path in tensor_files(directory).items():
        if name.startswith(prefix):
            by_file.setdefault(path, []).append(name)
    return by_file


@contextmanager
def _opened(path: Path) -> Iterator[Any]:  # safetensors has no type stubs
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


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
