from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deployments.errors import CheckpointError
from deployments.weights import checkpoint as uploading
from deployments.weights.checkpoint import upload

CPU = torch.device("cpu")
TENSORS = {
    "large": torch.arange(3_000_001, dtype=torch.float32).view(1, -1),
    "half": torch.arange(7).bfloat16(), "number": torch.tensor(3), "empty": torch.zeros(0, 4),
    "other": torch.ones(2, dtype=torch.bool),
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "weights.safetensors", metadata={"format": "pt"})
    return tmp_path / "weights.safetensors"


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def test_the_named_tensors_are_those_of_the_file(file: Path) -> None:
    names = ["half", "large", "number", "empty"]
    uploaded = upload({file: names}, CPU)
    assert list(uploaded) == names
    assert all(same(uploaded[name], TENSORS[name]) for name in names)


def test_parts_need_not_divide_a_tensor(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploading, "_PART_BYTES", 999_983)
    assert same(upload({file: ["large"]}, CPU)["large"], TENSORS["large"])


def test_a_file_that_ends_too_early_is_named(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"weights\.safetensors: the file is truncated"):
        upload({file: list(TENSORS)}, CPU)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"\x09" + bytes(7) + b"no header")
    with pytest.raises(CheckpointError, match=r"cannot read .*weights\.safetensors"):
        upload({tmp_path / "weights.safetensors": ["large"]}, CPU)
    with pytest.raises(CheckpointError, match=r"cannot read .*absent\.safetensors"):
        upload({tmp_path / "absent.safetensors": ["large"]}, CPU)
