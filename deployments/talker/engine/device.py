"""Differences between CPU and GPU outside the engine's steps. `ModelRunner` handles those within steps."""

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
from deployments.gpu.card import Card, half_precision, torch_cuda, unsupported_reason
from deployments.talker.state.kv_cache import CacheBounds, GpuMemory
from deployments.weights.store import Report, cache_directory

_SYSFS = Path("/sys")
_GPU_MEMORY_FRACTION = 0.85  # default share of a GPU's memory
MAX_LEAD_S = 8.0  # on a GPU, a sequence this far ahead of playback sits out steps while others are waiting


class EngineDevice:
    """The configured device, with its dtype and KV block size. Tests override these."""

    def __init__(self, config: TalkerConfig, name: str = "") -> None:
        """Create the configured device, or the device `name` instead."""
        name = name or config.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(name)
        self.on_gpu = self.device.type == "cuda"
        self.max_lead_s = MAX_LEAD_S if self.on_gpu else math.inf  # a CPU has time for all of its rows
        # flash-attn does not support blocks smaller than 256.
        self.block_size = 16 if not self.on_gpu else 256 if config.attention == "flash_attn" else 64

    @cached_property
    def dtype(self) -> torch.dtype:
        """Type of the talker's weights, keys and values. Queries the GPU, so `begin` must be called first."""
        dtype: torch.dtype = getattr(torch, half_precision(capability_of(self.device)) if self.on_gpu else "float32")
        return dtype

    def startup_lock(self, report: Report) -> AbstractContextManager[None]:
        """Return a context in which no other engine starts on this GPU. Calls `report` if it has to wait."""
        return gpu_startup_lock(report) if self.on_gpu else nullcontext()

    def begin(self) -> str | None:
        """Start using the device. Returns a message for the start-up log. Raises EngineError for an unsupported GPU."""
        near = None
        if self.on_gpu:
            _check_card(self.device)
            near = _use_cpus_near(self.device)
        torch.zeros(1, device=self.device)
        return near

    def memory(self) -> GpuMemory | None:
        """Return the GPU's memory, of which the KV cache gets the rest. Must be called before anything is loaded."""
        return GpuMemory(self.device) if self.on_gpu else None


def cache_bounds(config: TalkerConfig, block_bytes: int, block_size: int) -> CacheBounds:
    """Return the configured GPU memory limits, if `kv_cache_bytes` is not set."""
    longest = -(-config.max_model_len // block_size)
    fraction = config.gpu_memory_fraction or _GPU_MEMORY_FRACTION
    return CacheBounds(fraction, (longest + 1) * block_bytes, (config.max_num_seqs * longest + 1) * block_bytes)


@contextmanager
def gpu_startup_lock(report: Report) -> Iterator[None]:
    """Wait while another engine is starting on this GPU, so that no engine measures memory while another allocates it.

    The lock is released when the process exits.
    """
    gpu = re.sub(r"[^A-Za-z0-9-]", "", os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0])
    file = cache_directory() / f"gpu-{gpu}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another engine to start on this GPU")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_card(device: torch.device) -> None:
    """Raise EngineError for an unsupported GPU. `talkray doctor` also checks the driver."""
    properties: Any = torch.cuda.get_device_properties(device)
    card = Card(properties.name, (properties.major, properties.minor), "", properties.total_memory, 0)
    reason = unsupported_reason(card, torch_cuda())
    if reason is not None:
        raise EngineError(reason)


def _use_cpus_near(device: torch.device) -> str | None:
    """Pin this thread and those it starts to the CPUs of the GPU's NUMA node, so pinned memory is allocated there.

    PyTorch's `torch.numa` does this only for processes of torchrun. Returns a description of the CPUs. Returns None and
    changes nothing if no allowed CPU is near, if all are near, or if the kernel does not report which are.
    """
    allowed = os.sched_getaffinity(0)
    properties: Any = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        listed = (_SYSFS / "bus/pci/devices" / address / "local_cpulist").read_text(encoding="ascii").strip()
    except OSError:  # sysfs may be hidden in a container
        return None
    spans = [part.split("-") for part in listed.split(",") if part]  # such as 0-15,64-79
    near = allowed & {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}
    if not near or near == allowed:
        return None
    os.sched_setaffinity(0, near)
    return f"{len(near)} of {len(allowed)} CPUs, those near GPU {address}"
