"""Terminal output: progress of a run, and its results."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable

from loadtest.measure import Result
from loadtest.runner import Runner
from loadtest.sweep import Sweep
from loadtest.tables import (
    BRIEF,
    MS,
    Table,
    cells,
    fact_table,
    kind_table,
    percentile_table,
    phase_table,
    rate_table,
    run_facts,
    run_verdict,
    sweep_verdict,
    warnings,
)
from loadtest.traces import Failure

LIVE_PERIOD_S = 0.5
PLAIN_PERIOD_S = 2.0
PIPE_WIDTH = 190
RECENT = 200  # number of responses in the running percentiles


class Screen:
    """Progress display of one run after another: a live line on a terminal, else a line every PLAIN_PERIOD_S."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._runner: Runner | None = None

    def show(self, runner: Runner) -> None:
        self._runner = runner

    def done(self, step: Result) -> None:
        row = ", ".join(f"{title} {cell}" for title, cell in zip(BRIEF, cells(step.summary, BRIEF), strict=True))
        self.console.print(f"{step.rate:.3g} requests/s: {row}", highlight=False, soft_wrap=True)

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        showing = asyncio.create_task(self._show())
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.wait([showing])

    async def _show(self) -> None:
        if not self.console.is_terminal:
            while True:
                self.console.print(self._line(), highlight=False, soft_wrap=True)
                await asyncio.sleep(PLAIN_PERIOD_S)
        with self.console.status(self._line()) as status:
            while True:
                status.update(self._line())
                await asyncio.sleep(LIVE_PERIOD_S)

    def _line(self) -> str:
        return progress_line(self._runner) if self._runner else "checking the server"


def progress_line(runner: Runner) -> str:
    ended = Counter(trace.failure for trace in runner.traces)
    known = (None, Failure.REFUSED, Failure.INTERRUPTED)
    # Does not use numpy, whose first percentile call takes 40 ms and would delay requests.
    recent_ms = sorted(MS * trace.ttfb_s for trace in runner.traces[-RECENT:] if trace.ttfb_s is not None)

    def recent(share: float) -> str:
        return f"{recent_ms[round(share * (len(recent_ms) - 1))]:.0f} ms" if recent_ms else "-"

    facts = {
        "time": f"{runner.clock.now_s():.0f}/{runner.settings.duration_s:.0f} s" if runner.clock else "warm-up",
        "sent": f"{runner.sent}/{len(runner.schedule)}",
        "running": runner.sent - ended.total(),
        "spoken": ended[None],
        "refused": ended[Failure.REFUSED],
        "failed": ended.total() - sum(ended[outcome] for outcome in known),
        "TTFB p50": recent(0.5),
        "TTFB p95": recent(0.95),
        "max lag": f"{runner.max_lag_s * MS:.0f} ms",
    }
    return f"{runner.folder.path.name}: " + "  ".join(f"{name} {value}" for name, value in facts.items())


@contextlib.contextmanager
def simulated_time(title: str, total_s: float, console: Console) -> Iterator[Callable[[float], None]]:
    """Show the progress of a simulation: a bar on a terminal, else a line every PLAIN_PERIOD_S."""

    def line(now_s: float) -> str:
        return f"{title}: " + (f"{now_s / total_s:.0%}" if now_s <= total_s else "the last streams are ending")

    if console.is_terminal:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(title, total=total_s)
            yield lambda now_s: progress.update(task, completed=now_s, description=line(now_s))
        return
    shown_s = time.monotonic()

    def show(now_s: float) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s > PLAIN_PERIOD_S:
            shown_s = time.monotonic()
            console.print(line(now_s), highlight=False, soft_wrap=True)

    yield show


def output_console() -> Console:
    """Create the console for results. Redirected output is wide enough for all tables."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def print_table(table: Table, console: Console) -> None:
    """Print a table with all columns but the first right-aligned. Tables of facts have no frame."""
    named = any(table.titles)
    shown = RichTable() if named else RichTable.grid(padding=(0, 2))
    for index, title in enumerate(table.titles):
        shown.add_column(title, justify="right" if index and named else "left")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def show_result(result: Result, console: Console) -> None:
    show_verdict(run_verdict(result), warnings([result]), console)
    print_table(fact_table(run_facts(result)), console)
    if len(result.by_phase) > 1:
        print_table(phase_table(result.by_phase, BRIEF), console)
    if result.by_kind:
        print_table(kind_table([result]), console)
    print_table(percentile_table(result), console)


def show_sweep(sweep: Sweep, titles: Sequence[str], console: Console) -> None:
    print_table(rate_table(sweep, titles), console)
    if (kinds := kind_table(sweep.steps)).rows:
        print_table(kinds, console)
    show_verdict(sweep_verdict(sweep), warnings(sweep.steps), console)


def show_verdict(verdict: str, notes: Sequence[str], console: Console) -> None:
    console.print(f"[bold]{verdict}[/]", highlight=False)
    for note in notes:
        console.print(f"[bold yellow]Note:[/] {note}", highlight=False)
