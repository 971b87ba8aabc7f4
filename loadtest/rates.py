"""Given rates, one after the other, and a table of them: how does the server do at each?"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from loadtest.arrivals import Phase
from loadtest.lengths import FRAMES_PER_S
from loadtest.measure import Result, Show, measure
from loadtest.metrics import Distribution, distribution
from loadtest.runner import Settings
from loadtest.traces import RunFolder, Trace

DRAIN_S = 4.0  # the last answers of a rate, and the warm-up of the next
MS = 1000.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Which rates are tried, and for how long."""

    rates: tuple[float, ...]  # requests per second
    duration_s: float
    min_requests: int = 0  # a rate is tried for longer where it would not bring so many
    settle_s: float = 0.0  # before each, at the same rate, not measured
    budget_s: float | None = None  # a rate that would not end within it is not tried

    def phases(self, rate: float) -> tuple[Phase, ...]:
        """The load of one rate."""
        settle = (Phase("settling in", rate, self.settle_s, measured=False),) if self.settle_s else ()
        return (*settle, Phase("measured", rate, max(self.duration_s, self.min_requests / rate)))

    def fits(self, rate: float, *, elapsed_s: float) -> bool:
        """Whether there is time for this rate."""
        needed_s = sum(phase.duration_s for phase in self.phases(rate)) + DRAIN_S
        return self.budget_s is None or elapsed_s + needed_s <= self.budget_s


@dataclass(frozen=True, slots=True)
class Row:
    """What the server did at one rate."""

    rate: float
    requests: int
    spoken: int
    refused: int
    failed: int
    with_underrun: int  # of those spoken
    ttfa_s: Distribution | None  # from the planned arrival
    end_to_end_s: Distribution | None  # planned arrival to the last byte
    rtf_p50: float | None
    audio_s_per_s: float | None  # from the first planned arrival to the last byte of all
    planned_audio_s: float  # of all requests; of those whose length is not known, what they brought
    in_time_share: float | None  # of the planned audio: spoken without an underrun
    lag_p99_s: float | None  # of the client
    client_was_slow: bool

    @property
    def underrun_share(self) -> float | None:
        """Of the answers."""
        return self.with_underrun / self.spoken if self.spoken else None


def summarize(rate: float, result: Result, *, frames: Sequence[int | None]) -> Row:
    """The row of one run. `frames` are the planned lengths, by the requests' index; None where unknown."""
    traces, summary = result.measured, result.summary
    spoken = [trace for trace in traces if trace.failure is None]
    smooth = [trace for trace in spoken if trace.playback is not None and not trace.playback.underruns]

    def planned_s(trace: Trace) -> float:
        length = frames[trace.index]
        return trace.audio_s if length is None else length / FRAMES_PER_S

    planned_audio_s = sum(planned_s(trace) for trace in traces)
    return Row(
        rate=rate,
        requests=summary.sent,
        spoken=len(spoken),
        refused=summary.refused,
        failed=summary.failed,
        with_underrun=len(spoken) - len(smooth),
        ttfa_s=summary.from_planned.ttfa_s,
        end_to_end_s=distribution([trace.finished_s - trace.planned_s for trace in spoken]),
        rtf_p50=summary.rtf.p50 if summary.rtf else None,
        audio_s_per_s=summary.audio_s_per_s,
        planned_audio_s=planned_audio_s,
        in_time_share=sum(planned_s(trace) for trace in smooth) / planned_audio_s if planned_audio_s else None,
        lag_p99_s=summary.scheduling_lag_s.p99 if summary.scheduling_lag_s else None,
        client_was_slow=summary.client_was_slow,
    )


async def try_rates(
    settings: Settings,
    plan: Rates,
    *,
    folder: RunFolder,
    show: Show,
    done: Callable[[Row], None],
) -> bool:
    """Measure each rate in a folder of its own, and give each row to `done`; False if Ctrl-C ended it early."""
    folder.check_unused()
    rows: list[Row] = []
    whole, began_s = True, time.monotonic()
    for index, rate in enumerate(plan.rates):
        if not (whole and plan.fits(rate, elapsed_s=time.monotonic() - began_s)):
            continue
        own = replace(
            settings, phases=plan.phases(rate), seed=settings.seed + index, warmup=0 if rows else settings.warmup
        )
        result, whole = await measure(own, RunFolder(folder.path / f"{index:02d}-rate-{rate:g}"), show=show)
        frames = [request.frames for request in own.schedule()]
        rows.append(summarize(rate, result, frames=frames))
        done(rows[-1])
    folder.write_json("rates.json", {"plan": asdict(plan), "rows": [record(each) for each in rows]})
    return whole


def record(row: Row) -> dict[str, Any]:
    """What rates.json says of a rate."""
    return asdict(row) | {"underrun_share": row.underrun_share}


WIDTHS = {
    "r/s": 5,
    "requests": 8,
    "TTFA p50/p95/p99, ms": 21,
    "end p50/p95, s": 13,
    "RTF": 6,
    "audio s/s": 9,
    "in time": 8,
    "underruns": 12,
    "refused": 7,
    "failed": 6,
    "lag p99, ms": 11,
}


def header() -> str:
    """The line above the rows, which come one by one."""
    return "  ".join(f"{title:>{width}}" for title, width in WIDTHS.items())


def line(row: Row) -> str:
    """One row."""
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells(row), WIDTHS.values(), strict=True))


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, under the titles of WIDTHS."""
    ttfa, end = row.ttfa_s, row.end_to_end_s
    return (
        f"{row.rate:g}",
        str(row.requests),
        f"{ttfa.p50 * MS:.1f} / {ttfa.p95 * MS:.1f} / {ttfa.p99 * MS:.1f}" if ttfa else "-",
        f"{end.p50:.2f} / {end.p95:.2f}" if end else "-",
        "-" if row.rtf_p50 is None else f"{row.rtf_p50:.3f}",
        "-" if row.audio_s_per_s is None else f"{row.audio_s_per_s:.0f}",
        "-" if row.in_time_share is None else f"{row.in_time_share:.2%}",
        f"{row.with_underrun}" + (f" ({row.underrun_share:.2%})" if row.underrun_share else ""),
        str(row.refused),
        str(row.failed),
        "-" if row.lag_p99_s is None else f"{row.lag_p99_s * MS:.1f}" + (" SLOW" if row.client_was_slow else ""),
    )
