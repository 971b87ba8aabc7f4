"""Profile device time by kernel, for a single step and for an engine under load.

A kernel may start early and wait for its predecessor, so summing durations would count time twice. Each kernel of a
step therefore counts only from the end of the previous kernel, and the shares add up to the whole step.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_RUNS = 5
# Substrings of kernel names. The first match decides.
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
    """One kind of kernel's share of a step."""

    batch: int
    half: str  # "predictor" (up to the codes) or "talker"
    part: str
    launches: float  # per step
    ms: float  # per step


# Codec kernels. The codec's CUDA stream runs only these.
_CODEC = ("conv_kernel", "remember_kernel", "attention_kernel", "depthwise_norm_kernel", "waveform_kernel")


@dataclass(frozen=True, slots=True)
class Busy:
    """One kind of work's share of device time under load."""

    rate: float  # requests per second
    part: str  # predictor, talker, prompts, codec or copies; "nothing" is idle time
    ms: float  # per second, while at least one kernel of this part runs
    alone_ms: float  # per second, while only kernels of this part run


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of a kernel, as recorded by the profiler."""

    name: str
    start_us: float
    end_us: float
    stream: int = 0


def profile_step(step: Callable[[], None], *, batch: int) -> list[Share]:
    """Profile captured steps and return how their time is divided."""
    step()
    return shares_of(_ran(step, runs=_RUNS), batch=batch, runs=_RUNS)


def profile_load(work: Callable[[], None], *, rate: float) -> list[Busy]:
    """Profile `work`, which serves `rate` requests per second, and return how device time is divided."""
    return busy_of(_ran(work, runs=1), rate=rate)


def _ran(work: Callable[[], None], *, runs: int) -> list[Ran]:
    """Run `work` and return the profiler's raw events. Converting half a million events would take minutes."""
    torch.cuda.synchronize()
    recorded = profile(activities=[ProfilerActivity.CUDA])
    with recorded:
        for _ in range(runs):
            work()
        torch.cuda.synchronize()
    noted = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [
        Ran(event.name(), event.start_ns() / 1000, event.end_ns() / 1000, event.device_resource_id())
        for event in noted
        if event.device_type() == DeviceType.CUDA
    ]


def busy_of(ran: Iterable[Ran], *, rate: float) -> list[Busy]:
    """Split the time between the first and the last kernel by active work, in milliseconds per second."""
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
    """Yield the kernels in order of start time, each with its kind of work."""
    codec = {kernel.stream for kernel in ran if kernel.name in _CODEC}
    halves: dict[int, str] = {}  # by CUDA stream, for the steps and for the lane
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
    """Return the kernels of `runs` equal steps, grouped by half and part, largest share first."""
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
    """Return the part of a step to which a kernel belongs."""
    return next((part for word, part in _PARTS if word in name.lower()), "state, copies and the rest")
