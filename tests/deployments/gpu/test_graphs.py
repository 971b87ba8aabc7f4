import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deployments.errors import CheckpointError
from deployments.gpu import graphs
from deployments.gpu.graphs import upload, use_cpus_near

CPU = torch.device("cpu")
TENSORS = {
    "large": torch.arange(3_000_001, dtype=torch.float32).view(1, -1),
    "half": torch.arange(7).bfloat16(),
    "number": torch.tensor(3),
    "empty": torch.zeros(0, 4),
    "other": torch.ones(2, dtype=torch.bool),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "weights.safetensors", metadata={"format": "pt"})
    return tmp_path / "weights.safetensors"


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def test_the_named_tensors_are_those_of_the_file(file: Path) -> None:
    names = ["half", "large", "number", "empty"]
    found = upload({file: names}, CPU)
    assert list(found) == names
    assert all(same(found[name], TENSORS[name]) for name in names)


def test_parts_need_not_divide_a_tensor(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_PART_BYTES", 999_983)
    assert same(upload({file: ["large"]}, CPU)["large"], TENSORS["large"])


def test_a_file_that_ends_too_early_is_named(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"weights\.safetensors: it ends too early"):
        upload({file: list(TENSORS)}, CPU)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"\x09" + bytes(7) + b"no header")
    with pytest.raises(CheckpointError, match=r"cannot read .*weights\.safetensors"):
        upload({tmp_path / "weights.safetensors": ["large"]}, CPU)
    with pytest.raises(CheckpointError, match=r"cannot read .*absent\.safetensors"):
        upload({tmp_path / "absent.safetensors": ["large"]}, CPU)


@pytest.mark.parametrize(
    ("listed", "allowed", "used"),
    [
        ("0-3,8-11\n", range(16), {0, 1, 2, 3, 8, 9, 10, 11}),
        ("5\n", range(16), {5}),
        ("0-3\n", (2, 3, 9), {2, 3}),  # of a container's CPUs
        ("0-3\n", (8, 9), None),  # its CPUs are all far away
        ("0-15\n", range(16), None),  # one node
        ("\n", range(16), None),
        (None, range(16), None),  # nothing is said
    ],
)
def test_an_engine_runs_on_the_cpus_near_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None, allowed: range, used: set[int] | None
) -> None:
    if listed is not None:
        folder = tmp_path / "bus/pci/devices/0001:9b:00.0"
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(listed)
    pinned: list[set[int]] = []
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x9B, pci_device_id=0)
    monkeypatch.setattr("deployments.gpu.graphs._SYSFS", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: pinned.append(cpus))
    said = use_cpus_near(torch.device("cuda"))
    assert pinned == ([] if used is None else [used])
    assert said == (None if used is None else f"{len(used)} of {len(set(allowed))} CPUs, those near GPU 0001:9b:00.0")
