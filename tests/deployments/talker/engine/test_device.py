import fcntl
import math
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deployments.errors import EngineError
from deployments.talker.engine import device
from deployments.talker.engine.device import MAX_LEAD_S, EngineDevice, gpu_startup_lock
from deployments.talker.engine.engine import Engine
from tests.deployments.talker.conftest import CONFIG


@pytest.mark.parametrize(("listed", "allowed", "used"), [
    ("0-3,8-11\n", range(16), {0, 1, 2, 3, 8, 9, 10, 11}), ("5\n", range(16), {5}),
    ("0-3\n", (2, 3, 9), {2, 3}),  # of a container's CPUs
    ("0-3\n", (8, 9), None),  # its CPUs are all far away
    ("0-15\n", range(16), None),  # one node
    ("\n", range(16), None),
    (None, range(16), None),  # nothing is said
])  # fmt: skip
def test_an_engine_runs_on_the_cpus_near_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None, allowed: range, used: set[int] | None
) -> None:
    if listed is not None:
        folder = tmp_path / "bus/pci/devices/0001:9b:00.0"
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(listed)
    pinned: list[set[int]] = []
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x9B, pci_device_id=0)
    monkeypatch.setattr(device, "_SYSFS", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: pinned.append(cpus))
    said = device._use_cpus_near(torch.device("cuda"))
    assert pinned == ([] if used is None else [used])
    assert said == (None if used is None else f"{len(used)} of {len(set(allowed))} CPUs, those near GPU 0001:9b:00.0")


@pytest.mark.parametrize(("name", "lead_s"), [("cuda", MAX_LEAD_S), ("cpu", math.inf)])
def test_only_on_a_gpu_those_far_ahead_sit_steps_out(name: str, lead_s: float, engine: Engine) -> None:
    assert EngineDevice(CONFIG, name).max_lead_s == lead_s
    assert engine.scheduler._pacing._max_lead_s == EngineDevice(CONFIG).max_lead_s == math.inf


def test_a_gpu_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="V100", major=7, minor=0, total_memory=16 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with pytest.raises(EngineError, match=r"V100 has compute capability 7\.0 \(Volta\)"):
        EngineDevice(CONFIG, "cuda").begin()


def test_engines_of_one_gpu_start_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one would count the memory that another one takes as its own."""
    monkeypatch.setenv("TALKRAY_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    waits, order, file = threading.Event(), list[str](), device.cache_directory() / "gpu-GPU-1.lock"

    def start() -> None:
        with EngineDevice(CONFIG, "cuda").startup_lock(lambda stage: waits.set()), file.open() as lock:
            with pytest.raises(BlockingIOError):  # a third engine would wait too
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            order.append("second")

    with EngineDevice(CONFIG, "cuda").startup_lock(pytest.fail), EngineDevice(CONFIG).startup_lock(pytest.fail):
        second = threading.Thread(target=start)
        second.start()
        assert waits.wait(30)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2")
        with gpu_startup_lock(pytest.fail):  # engines of other GPUs do not wait
            order.append("first")
    second.join(30)
    assert order == ["first", "second"]
