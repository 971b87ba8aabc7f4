"""Differences between a CPU and a GPU, except for the steps of an engine, which are in `ModelRunner`."""

import fcntl
import math
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from deployments.config import TalkerConfig
from deployments.errors import EngineError
from deployments.gpu.capability import capability_of
from deployments.gpu.card import Card, half_precision, torch_cuda, why_not
from deployments.talker.state.kv_cache import CacheBounds, GpuMemory
from deployments.weights.store import Report, cache_directory

_SYSFS = Path("/sys")
_GPU_MEMORY_FRACTION = 0.85  # share of a GPU's memory, if the settings do not set it
MAX_LEAD_S = 8.0  # on a GPU a sequence this far ahead of its listener sits steps out while others wait


class EngineDevice:
    """The device of the settings, with the type and the KV block size that suit it. Tests set others."""

    def __init__(self, config: TalkerConfig, name: str = "") -> None:
        """`name`: a device other than that of the settings."""
        name = name or config.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(name)
        self.on_gpu = self.device.type == "cuda"
        self.max_lead_s = MAX_LEAD_S if self.on_gpu else math.inf  # a CPU has time for all its rows
        # flash-attn takes no smaller blocks than 256.
        self.block_size = 16 if not self.on_gpu else 256 if config.attention == "flash_attn" else 64

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of the talker's weights, keys and values. Asks the GPU, so not before `begin`."""
        dtype: torch.dtype = getattr(torch, half_precision(capability_of(self.device)) if self.on_gpu else "float32")
        return dtype

    def turn(self, report: Report) -> AbstractContextManager[None]:
        """Within the block no other engine starts on the GPU. `report` is called if this one has to wait."""
        return turn_on_gpu(report) if self.on_gpu else nullcontext()

    def begin(self) -> str | None:
        """Begin to use the device. Returns what the start should report about it. Raises EngineError if it has no
        kernels.
        """
        near = None
        if self.on_gpu:
            _check_card(self.device)
            near = _use_cpus_near(self.device)
        torch.zeros(1, device=self.device)
        return near

    def memory(self) -> GpuMemory | None:
        """The memory of a GPU, whose rest is for keys and values. Call it before anything is loaded."""
        return GpuMemory(self.device) if self.on_gpu else None


def cache_bounds(config: TalkerConfig, block_bytes: int, block_size: int) -> CacheBounds:
    """The GPU memory that the settings ask for, if they do not set the cache's size itself."""
    longest = -(-config.max_model_len // block_size)
    fraction = config.gpu_memory_fraction or _GPU_MEMORY_FRACTION
    return CacheBounds(fraction, (longest + 1) * block_bytes, (config.max_num_seqs * longest + 1) * block_bytes)


@contextmanager
def turn_on_gpu(report: Report) -> Iterator[None]:
    """Waits while another engine starts on this GPU, so that none measures memory that another one is taking.

    The turn of a process that dies is over.
    """
    gpu = re.sub(r"[^A-Za-z0-9-]", "", os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0])
    file = cache_directory() / f"gpu-{gpu}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another engine that starts on this GPU")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_card(device: torch.device) -> None:
    """Raises EngineError for a GPU without kernels; `talkray doctor` checks the driver too."""
    properties: Any = torch.cuda.get_device_properties(device)
    card = Card(properties.name, (properties.major, properties.minor), "", properties.total_memory, 0)
    reason = why_not(card, torch_cuda())
    if reason is not None:
        raise EngineError(reason)


def _use_cpus_near(device: torch.device) -> str | None:
    """Keep this thread, and threads that it starts, on the CPUs of the GPU's own NUMA node, where memory that is pinned
    later lies too. (PyTorch's `torch.numa` does this for processes of torchrun only.) Returns the name of the CPUs.

    Returns None and changes nothing if no allowed CPU is near, all are, or the kernel does not tell.
    """
    allowed = os.sched_getaffinity(0)
    properties: Any = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        listed = (_SYSFS / "bus/pci/devices" / address / "local_cpulist").read_text(encoding="ascii").strip()
    except OSError:  # a container may hide it
        return None
    spans = [part.split("-") for part in listed.split(",") if part]  # of 0-15,64-79
    near = allowed & {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}
    if not near or near == allowed:
        return None
    os.sched_setaffinity(0, near)
    return f"{len(near)} of {len(allowed)} CPUs, those near GPU {address}"
