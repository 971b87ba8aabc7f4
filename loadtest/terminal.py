"""What a person sees: the run while it goes on, and its numbers at the end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from loadtest.measure import PhaseResult, Result
from loadtest.metrics import MAX_CLIENT_LAG_S, Distribution, Limits, Summary
from loadtest.runner import Progress
from loadtest.server_timing import by_stage
from loadtest.sweep import Step, Sweep
from loadtest.traces import Failure, Trace

MS = 1000.0
LIVE_PERIOD_S = 0.5
PLAIN_PERIOD_S = 2.0
BAR_WIDTH = 60
PIPE_WIDTH = 120


class Screen:
    """Shows the progress of one run after another: a live table on a terminal, else a line every PLAIN_PERIOD_S."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._title = ""
        self._progress: Progress | None = None
        self._above: RenderableType | None = None

    def run(self, title: str, above: RenderableType | None = None) -> Callable[[Progress], None]:
        """What a run reports its progress to; `above` stays on the screen meanwhile."""

        def show(progress: Progress) -> None:
            self._title, self._progress, self._above = title, progress, above

        return show

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Show whatever runs inside."""
        showing = asyncio.create_task(self._show())
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.wait([showing])

    async def _show(self) -> None:
        if not self.console.is_terminal:
            await _repeat(self._print_line, PLAIN_PERIOD_S)
            return
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            await _repeat(lambda: live.update(self._view(), refresh=True), LIVE_PERIOD_S)

    def _print_line(self) -> None:
        """The first line comes before any request: it takes longer than others."""
        line = f"{self._title}: {progress_line(self._progress)}" if self._progress else "looking at the server"
        self.console.print(line, highlight=False, soft_wrap=True)

    def _view(self) -> RenderableType:
        if self._progress is None:
            return "looking at the server"
        view: list[RenderableType] = [progress_table(self._progress, self._title), progress_bar(self._progress)]
        return Group(*view) if self._above is None else Group(self._above, *view)


async def _repeat(show: Callable[[], None], period_s: float) -> None:
    while True:
        show()
        await asyncio.sleep(period_s)


def progress_cells(progress: Progress) -> dict[str, str]:
    """The numbers to show, by their title."""
    # Not numpy's percentiles: their first call takes 40 ms, in which no request could be sent.
    recent_ms = [MS * ttfb_s for ttfb_s in sorted(progress.recent_ttfb_s)]
    last = len(recent_ms) - 1
    return {
        "time": f"{progress.elapsed_s:.0f}/{progress.duration_s:.0f} s" if progress.clock else "warm-up",
        "sent": f"{progress.sent}/{progress.planned}",
        "running": str(progress.running),
        "spoken": str(progress.finished[None]),
        "refused": str(progress.finished[Failure.REFUSED]),
        "failed": str(progress.failed),
        "TTFB p50": f"{recent_ms[round(0.5 * last)]:.0f} ms" if recent_ms else "-",
        "TTFB p95": f"{recent_ms[round(0.95 * last)]:.0f} ms" if recent_ms else "-",
        "max lag": f"{progress.max_lag_s * MS:.0f} ms",
    }


def progress_line(progress: Progress) -> str:
    """The numbers in one line."""
    return "  ".join(f"{title} {value}" for title, value in progress_cells(progress).items())


def progress_table(progress: Progress, title: str) -> Table:
    """The numbers as a table of one row."""
    table = Table(title=title, title_justify="left")
    cells = progress_cells(progress)
    for name in cells:
        table.add_column(name, justify="right", min_width=8)
    table.add_row(*cells.values())
    return table


def progress_bar(progress: Progress) -> ProgressBar:
    """How much of the schedule's time has passed."""
    return ProgressBar(total=progress.duration_s or 1.0, completed=progress.elapsed_s, width=BAR_WIDTH)


def output_console() -> Console:
    """Where results are printed: as wide as the tables where that is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def show_result(result: Result, console: Console, *, whole: bool) -> None:
    """The final lines and tables of one run."""
    summary = result.summary
    console.print(facts_table(summary, result.limits, whole=whole))
    if len(result.phase_results) > 1:
        console.print(phase_table(result.phase_results))
    console.print(percentile_table(summary))
    if any(trace.server_timing_s for trace in result.measured):
        console.print(stage_table(result.measured))
    show_warnings(warnings(summary), console)


def show_sweep(sweep: Sweep, console: Console) -> None:
    """The final table of a sweep, and the capacity."""
    console.print(sweep_table(sweep.steps))
    limits = sweep.steps[0].result.limits if sweep.steps else Limits()
    share = f"{sweep.plan.held_share:.0%} of the requests within the limits ({limits})"
    if sweep.capacity_per_s is None:
        console.print(f"Capacity: below {sweep.plan.first_rate:g} requests/s: not even that rate had {share}.")
    else:
        console.print(f"Capacity: {sweep.capacity_per_s:.2f} requests/s, the highest rate with {share}.")
    slow = [f"{step.rate:.2f}" for step in sweep.steps if step.result.summary.client_was_slow]
    if slow:
        show_warnings([f"this client was too slow at {', '.join(slow)} requests/s: do not trust these rows."], console)


def show_warnings(notes: Sequence[str], console: Console) -> None:
    """What to know before believing the numbers."""
    for note in notes:
        console.print(f"[bold yellow]Note:[/] {note}", highlight=False)


def facts_table(summary: Summary, limits: Limits, *, whole: bool) -> Table:
    """Counts, rates and playback, a line each."""
    facts = Table.grid(padding=(0, 2))
    sent = f"{summary.sent} of {summary.planned} sent" + ("" if whole else ", then interrupted")
    dropped = f", {summary.interrupted} dropped by the interrupt" if summary.interrupted else ""
    outcome = f"{summary.succeeded} spoken, {summary.refused} refused, {summary.failed} failed{dropped}"
    facts.add_row("Requests", f"{sent}: {outcome}")
    if summary.causes:
        facts.add_row("Causes", ", ".join(f"{cause}: {count}" for cause, count in summary.causes.items()))
    if summary.refused:
        facts.add_row("Refusals", f"{summary.refused_with_advice} of {summary.refused} said when to try again")
    rates = {
        "planned": summary.offered_per_s,
        "sent": summary.achieved_per_s,
        "spoken": summary.completed_per_s,
        "good": summary.good_per_s,
    }
    facts.add_row("Requests/s", ", ".join(f"{name} {number(value, 2)}" for name, value in rates.items()))
    if summary.good_share is not None:
        facts.add_row("Good", f"{summary.good_share:.1%} of the requests: {limits}")
    facts.add_row("Audio", f"{summary.audio_s:.1f} s, {number(summary.audio_s_per_s, 2)} audio seconds per second")
    if playback := summary.continuity:
        facts.add_row("Underruns", f"{playback.underruns} in {playback.underrun_share:.1%} of the answers")
        viable = f"{playback.chunk_viability:.2%} of chunks, {playback.request_viability:.1%} of answers"
        facts.add_row("In time", viable)
    return facts


def right_aligned(*titles: str) -> Table:
    """An empty table, all columns but the first to the right."""
    table = Table(*titles)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def percentile_table(summary: Summary) -> Table:
    """Distributions, a row each."""
    table = right_aligned("", "n", "mean", "p50", "p90", "p95", "p99", "max")
    for title, values, scale in distributions(summary):
        if values is None:
            table.add_row(title, "0", *"------")
            continue
        cells = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
        table.add_row(title, str(values.count), *(number(cell * scale, 1 if scale == MS else 3) for cell in cells))
    return table


def stage_table(traces: Sequence[Trace]) -> Table:
    """Where the time to the first byte goes, in the order of the stages."""
    table = right_aligned("stage before the first byte, ms", "n", "mean", "p50", "p95", "max")
    for stage, durations_s in by_stage(traces).items():
        p50, p95 = np.percentile(durations_s, (50, 95))
        cells = (float(np.mean(durations_s)), float(p50), float(p95), max(durations_s))
        table.add_row(stage, str(len(durations_s)), *(number(cell * MS, 2) for cell in cells))
    return table


def phase_table(phases: Sequence[PhaseResult]) -> Table:
    """Phases, a row each."""
    table = right_aligned("phase", "offered/s", "good/s", "good", "refused", "failed", "TTFB p50", "p95", "recovered")
    for phase in phases:
        recovered = "no" if phase.recovered_after_s is None else f"after {phase.recovered_after_s:.0f} s"
        outcomes = outcome_cells(phase.summary)
        table.add_row(phase.name, f"{phase.placed.phase.rate:.2f}", *outcomes, recovered)
    return table


def sweep_table(steps: Sequence[Step]) -> Table:
    """Rates, a row each."""
    table = right_aligned(
        "offered/s", "good/s", "good", "refused", "failed", "TTFB p50", "p95", "RTF p50", "in time", "audio s/s"
    )
    for step in sorted(steps, key=lambda step: step.rate):
        summary = step.result.summary
        viable = f"{summary.continuity.request_viability:.0%}" if summary.continuity else "-"
        rtf = number(summary.rtf.p50 if summary.rtf else None, 2)
        audio = number(summary.audio_s_per_s, 1)
        table.add_row(f"{step.rate:.2f}", *outcome_cells(summary), rtf, viable, audio)
    return table


def outcome_cells(summary: Summary) -> list[str]:
    """Good requests, refusals, failures and TTFB, as the tables of phases and of rates show them."""
    ttfb = summary.from_planned.ttfb_s
    return [
        number(summary.good_per_s, 2),
        "-" if summary.good_share is None else f"{summary.good_share:.0%}",
        str(summary.refused),
        str(summary.failed),
        "-" if ttfb is None else f"{ttfb.p50 * MS:.0f} ms",
        "-" if ttfb is None else f"{ttfb.p95 * MS:.0f} ms",
    ]


def distributions(summary: Summary) -> list[tuple[str, Distribution | None, float]]:
    """Title, values and factor to the unit in the title, for each row of the table."""
    planned, sent = summary.from_planned, summary.from_send
    return [
        ("TTFB from plan, ms", planned.ttfb_s, MS),
        ("TTFP from plan, ms", planned.ttfp_s, MS),
        ("TTFA from plan, ms", planned.ttfa_s, MS),
        ("TTFB from send, ms", sent.ttfb_s, MS),
        ("TTFP from send, ms", sent.ttfp_s, MS),
        ("TTFA from send, ms", sent.ttfa_s, MS),
        ("leading silence, ms", summary.leading_silence_s, MS),
        ("stall, ms", summary.continuity.stall_s if summary.continuity else None, MS),
        ("RTF", summary.rtf, 1.0),
        ("client lag, ms", summary.scheduling_lag_s, MS),
    ]


def warnings(summary: Summary) -> list[str]:
    """What to know before believing the numbers."""
    notes = []
    if summary.client_was_slow and summary.scheduling_lag_s:
        lag_ms, limit_ms = summary.scheduling_lag_s.p99 * MS, MAX_CLIENT_LAG_S * MS
        notes.append(
            f"this client was too slow: its p99 lag behind the plan is {lag_ms:.0f} ms, more than {limit_ms:.0f} ms. "
            f"The server did not get the load that was planned; lower --rate or run the client on a machine of its own."
        )
    if summary.silent_answers:
        notes.append(f"{summary.silent_answers} answers hold no audible sample; they are missing in TTFA.")
    return notes


def number(value: float | None, digits: int) -> str:
    """The value, or a dash where nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f}"
