"""Strict reading of safetensors checkpoints: one `model.safetensors`, or an index with shards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deployments.errors import CheckpointError
from deployments.weights.store import INDEX_FILE, SINGLE_FILE, read_index
from deployments.weights.upload import upload

_MAX_SHOWN = 8

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
