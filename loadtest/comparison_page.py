"""Report page and tables for a comparison of two servers, with one column per server."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from loadtest.charts import distribution_chart
from loadtest.comparison import Compared, TurnPlan, WordsHeard, middle_ms, spread
from loadtest.measure import Result
from loadtest.metrics import Summary, summarize
from loadtest.report import Section, write_page
from loadtest.tables import COLUMNS, MS, Table, percentile, percentiles, warnings
from loadtest.traces import Trace

_ROWS = (
    *("sent", "answers", "TTFB p50/p95/p99, ms", "TTFA p50/p95/p99, ms", "whole p50/p95, s", "RTF p50"),
    *("C50/C100/C200, %", "underruns", "stall p95, ms", "lag p99, ms"),
)
MIN_TURNS = 3  # per server; with only two turns, chance alone picks the winner in a third of comparisons
_OF_TURN = ("sent", "answers", "TTFB p50/p95/p99, ms", "TTFA p50/p95/p99, ms", "C50/C100/C200, %")


def whole(one: Compared, plan: TurnPlan) -> Summary:
    """Summarize all turns of a server."""
    return summarize(one.traces, planned=len(one.traces), offered_per_s=plan.rate, limits=one.side.settings.limits)


def side_table(done: Sequence[Compared], plan: TurnPlan) -> Table:
    """Build a table that shows the servers side by side."""
    summaries = [whole(one, plan) for one in done]
    rows = [[name, *(COLUMNS[name](summary) for summary in summaries)] for name in _ROWS]
    rows += [[name, *(str(count(one.traces)) for one in done)] for name, count in _ENDINGS.items()]
    rows.append(["words misrecognised", *(_words(one.heard) for one in done)])
    return Table(("", *(one.side.name for one in done)), rows)


def _words(heard: WordsHeard | str) -> str:
    if isinstance(heard, str):
        return heard
    return f"{heard.errors / max(1, heard.words):.1%} ({heard.errors} of {heard.words}, {heard.answers} answers)"


def turn_table(done: Sequence[Compared]) -> Table:
    """Build a table with a row for each turn, which shows how much each server's results vary between turns."""
    rows = [
        [f"{number}", one.side.name, *(COLUMNS[name](one.turns[number - 1].summary) for name in _OF_TURN)]
        for number in range(1, len(done[0].turns) + 1)
        for one in done
    ]
    return Table(("turn", "server", *_OF_TURN), rows)


def _with_status(*statuses: int) -> Callable[[Sequence[Trace]], int]:
    return lambda traces: sum(trace.failure is not None and trace.status in statuses for trace in traces)


_REFUSALS = (429, 503)
_ENDINGS: dict[str, Callable[[Sequence[Trace]], int]] = {
    **{f"answered {status}": _with_status(status) for status in _REFUSALS},
    "failed otherwise": lambda traces: sum(t.failure is not None and t.status not in _REFUSALS for t in traces),
}
_OVERLOAD: dict[str, Callable[[Result], str]] = {
    "offered, requests/s": lambda run: f"{run.rate:g}",
    "sent": lambda run: str(run.summary.sent),
    "spoken": lambda run: str(run.summary.succeeded),
    "TTFA p50/p95/p99 of successes, ms": lambda run: percentiles(run.summary.ttfa_s, "p50", "p95", "p99"),
    "C50/C100/C200 of successes, %": lambda run: COLUMNS["C50/C100/C200, %"](run.summary),
    **{name: lambda run, count=count: str(count(run.measured)) for name, count in _ENDINGS.items()},  # type: ignore[misc]
    "refused with a retry time": lambda run: str(
        sum(t.status in _REFUSALS and t.retry_after_s is not None for t in run.measured)
    ),
    "refused within, p95": lambda run: _refused_within(run),
}


def _refused_within(run: Result) -> str:
    times_ms = sorted(MS * (t.finished_s - t.planned_s) for t in run.measured if t.status in _REFUSALS)
    return f"{times_ms[int(0.95 * (len(times_ms) - 1))]:.0f} ms" if times_ms else "-"


def overload_table(done: Sequence[Compared]) -> Table:
    runs = [one.overload for one in done if one.overload is not None]
    return Table(
        ("", *(one.side.name for one in done)),
        [[name, *(show(run) for run in runs)] for name, show in _OVERLOAD.items()],
    )


def leaving_table(done: Sequence[Compared]) -> Table:
    """Build a table that shows whether a server keeps working for clients that have left."""
    rows = [
        ["TTFB of a request alone, median", *(middle_ms(one.leaving.alone_s) for one in done)],
        [
            f"just after {done[0].leaving.leavers} clients left, median",
            *(middle_ms(one.leaving.behind_s) for one in done),
        ],
        ["failed requests", *(str(one.leaving.failed) for one in done)],
    ]
    return Table(("", *(one.side.name for one in done)), rows)


def verdict(done: Sequence[Compared], plan: TurnPlan) -> str:
    """Name the faster server if the turns' results are conclusive."""
    p95_ms = [[percentile(turn.summary.ttfa_s, "p95", MS) for turn in one.turns] for one in done]
    known = [[value for value in values if value is not None] for values in p95_ms]
    wholes = [percentile(whole(one, plan).ttfa_s, "p95", MS) for one in done]
    if any(value is None for value in wholes) or not all(known):
        return "One of the servers returned no audible audio, so the comparison has no result."
    first, second = (value or 0.0 for value in wholes)
    said = f"First audible sample at p95: A {first:.0f} ms, B {second:.0f} ms"
    if any(turn.summary.client_was_slow for one in done for turn in one.turns):
        return f"{said}. The result is invalid, because this client was late (see the lag). Repeat the comparison."
    apart = max(map(spread, known))
    sooner, later = ("A", "B") if first < second else ("B", "A")
    by_letter = dict(zip("AB", known, strict=True))
    gap = median(by_letter[later]) - median(by_letter[sooner])
    if max(by_letter[sooner]) < min(by_letter[later]) and gap > apart and plan.turns >= MIN_TURNS:
        return f"{said}: {sooner} was faster in every turn (turns of one server differ by up to {apart:.0f} ms)."
    few = "" if plan.turns >= MIN_TURNS else f"; fewer than {MIN_TURNS} turns do not show this"
    return f"{said}: the difference is not significant (turns of one server differ by up to {apart:.0f} ms{few})."


def _notes(done: Sequence[Compared]) -> list[str]:
    said = warnings([turn for one in done for turn in one.turns])
    return [note.replace(" (--duration, --min-requests)", " (--duration)") for note in said]


def _unlike(done: Sequence[Compared]) -> list[str]:
    """Describe how the servers differ in load or behaviour."""
    notes = []
    if len({one.side.settings.lengths for one in done}) > 1:
        notes.append("--speech-s applies to only one server; the other server speaks complete texts.")
    lengths_s = [median([t.audio_s for t in one.traces if t.audio_s] or [0.0]) for one in done]
    if min(lengths_s) and max(lengths_s) > 1.2 * min(lengths_s):
        shown = " and ".join(f"{length_s:.1f} s" for length_s in lengths_s)
        notes.append(f"The responses differ in length: {shown} (median).")
    return notes


def write_comparison(done: Sequence[Compared], plan: TurnPlan, out: Path) -> Path:
    groups = {one.side.name: one.traces for one in done}
    charts = [distribution_chart("server", groups, audible=True), distribution_chart("server", groups)]
    sections = [
        Section(f"Side by side, {plan.rate:g} requests/s, {plan.turns} turns each", side_table(done, plan), charts),
        Section("Turn by turn", turn_table(done)),
    ]
    if plan.overload:
        sections.append(Section(f"Overload: {plan.overload:g} times that rate", overload_table(done)))
    sections.append(Section("Effect of clients that disconnect on the next request", leaving_table(done)))
    return write_page(
        out,
        f"Compared: {' and '.join(one.side.name for one in done)}",
        verdicts={"": verdict(done, plan)},
        notes=[*_notes(done), *_unlike(done)],
        sections=sections,
        provenance={one.side.name: one.turns[0].about for one in done},
    )
