"""The device's time by kernel, for a single step and for an engine under load.

A kernel that starts early waits inside for its predecessor, so its duration would count time twice. In a step, each
kernel is therefore charged from the end of the previous kernel to its own end, so that the shares add up to the step.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_RUNS = 5
# Parts of kernel names; the first match counts.
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
    """The share of one kind of kernel in a step."""

    batch: int
    half: str  # predictor, up to the codes, or talker
    part: str
    launches: float  # per step
    ms: float  # per step


# Kernels of the codec, whose stream runs nothing else.
_CODEC = ("conv_kernel", "remember_kernel", "attention_kernel", "depthwise_norm_kernel", "waveform_kernel")


@dataclass(frozen=True, slots=True)
class Busy:
    """The share of one kind of work in the device's time under load."""

    rate: float  # requests per second
    part: str  # predictor, talker, prompts, codec, copies; "nothing": idle time
    ms: float  # per second in which some of it ran
    alone_ms: float  # per second in which only it ran


@dataclass(frozen=True, slots=True)
class Ran:
    """A kernel as the profiler saw it."""

    name: str
    start_us: float
    end_us: float
    stream: int = 0


def profile_step(step: Callable[[], None], *, batch: int) -> list[Share]:
    """Run captured steps under the profiler and split their time."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(_RUNS):
            step()
        torch.cuda.synchronize()
    return shares_of(_ran(recorded), batch=batch, runs=_RUNS)


def profile_load(work: Callable[[], None], *, rate: float) -> list[Busy]:
    """Run `work` at `rate` requests per second under the profiler, and split the device's time."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    return busy_of(_ran(recorded), rate=rate)


def _ran(recorded: profile) -> list[Ran]:
    """Kernels from the profiler's raw events; its readable form of half a million would take minutes."""
    noted = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [
        Ran(event.name(), event.start_ns() / 1000, event.end_ns() / 1000, event.device_resource_id())
        for event in noted
        if event.device_type() == DeviceType.CUDA
    ]


def busy_of(ran: Iterable[Ran], *, rate: float) -> list[Busy]:
    """The time from the first kernel to the last by what ran in it, in milliseconds per second."""
    borders = sorted(
        border
        for part, kernel in _by_part(sorted(ran, key=lambda each: each.start_us))
        for border in ((kernel.start_us, 1, part), (kernel.end_us, -1, part))
    )
    running: dict[str, int] = {}
    busy_us: dict[str, float] = {}
    alone_us: dict[str, float] = {}
    before_us = borders[0][0]
    for at_us, change, part in borders:
        parts = [each for each, count in running.items() if count] or ["nothing"]
        for each in parts:
            busy_us[each] = busy_us.get(each, 0.0) + at_us - before_us
        if len(parts) == 1:
            alone_us[parts[0]] = alone_us.get(parts[0], 0.0) + at_us - before_us
        running[part] = running.get(part, 0) + change
        before_us = at_us
    per_second = 1000 / (before_us - borders[0][0])
    found = [Busy(rate, part, us * per_second, alone_us.get(part, 0.0) * per_second) for part, us in busy_us.items()]
    return sorted(found, key=lambda busy: -busy.ms)


def _by_part(ran: list[Ran]) -> Iterator[tuple[str, Ran]]:
    """Kernels in the order of their starts, each with its kind of work."""
    codec = {kernel.stream for kernel in ran if kernel.name in _CODEC}
    halves: dict[int, str] = {}  # by CUDA stream: a step's, and the lane's
    for kernel in ran:
        if kernel.name.startswith(("Memcpy", "Memset")):
            yield "copies", kernel
        elif kernel.stream in codec:
            yield "codec", kernel
        else:
            before = halves.get(kernel.stream, "prompts")
            half = {"_gather": "predictor", "_feed": "talker"}.get(kernel.name, before)
            yield half, kernel
            halves[kernel.stream] = "prompts" if kernel.name == "_settle" else half


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
