"""Where the device's time of a step goes, by kernel.

A kernel that starts early waits inside for its predecessor, so its own duration counts time twice. Each is charged
from the end of the kernel before it to its own end instead: the shares add up to the step.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_RUNS = 5
# What stands in the names of kernels, first match.
_PARTS = (
    ("matmul", "products"),
    ("frame_start_attention", "attention"),
    ("attention", "attention"),
    ("flash", "attention"),
    ("prepare_rows", "attention"),
    ("sample_first_code", "sampling"),
    ("sample_code", "sampling and embedding"),
    ("begin_frame", "sampling and embedding"),
    ("gemm", "products (library)"),
    ("cutlass", "products (library)"),
)


@dataclass(frozen=True, slots=True)
class Share:
    """What one kind of kernel takes of a step."""

    batch: int
    half: str  # predictor, up to the codes, or talker
    part: str
    launches: float  # per step
    ms: float  # per step


@dataclass(frozen=True, slots=True)
class Ran:
    """A kernel as the profiler saw it."""

    name: str
    start_us: float
    end_us: float


def profile_step(step: Callable[[], None], *, batch: int) -> list[Share]:
    """Run recorded steps under the profiler and take them apart."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(_RUNS):
            step()
        torch.cuda.synchronize()
    events = [event for event in recorded.events() or [] if event.device_type == DeviceType.CUDA]
    ran = [Ran(event.name, event.time_range.start, event.time_range.end) for event in events]
    return shares_of(ran, batch=batch, runs=_RUNS)


def shares_of(ran: Iterable[Ran], *, batch: int, runs: int) -> list[Share]:
    """The kernels of `runs` equal steps, by half and part, the largest share first."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    half, before_us = "predictor", 0.0
    for kernel in sorted(ran, key=lambda each: each.end_us):
        if "_feed" in kernel.name:
            half = "talker"
        launches, us = found.get((half, part_of(kernel.name)), (0, 0.0))
        since = kernel.end_us - before_us if before_us else kernel.end_us - kernel.start_us
        found[half, part_of(kernel.name)] = launches + 1, us + since
        before_us = kernel.end_us
        if "_settle" in kernel.name:
            half = "predictor"
    shares = [
        Share(batch, half, part, launches / runs, us / runs / 1000) for (half, part), (launches, us) in found.items()
    ]
    return sorted(shares, key=lambda share: -share.ms)


def part_of(name: str) -> str:
    """Which part of a step a kernel belongs to."""
    return next((part for word, part in _PARTS if word in name.lower()), "state, copies and the rest")
