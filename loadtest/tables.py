"""Results of runs as text for the terminal and the report page: verdicts, warnings, facts and tables."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.measure import Result
from loadtest.metrics import FEW_ANSWERS, MAX_CLIENT_LAG_S, Distribution, Summary, distribution
from loadtest.sweep import Sweep

MS = 1000.0
MAX_SHOWN = 8
# Columns that a page shows by default. The reader can switch on the others.
IMPORTANT = ("TTFB p50/p95/p99, ms", "good", "goodput/s", "refused", "failed", "in time", "stall p95, ms", "answers")


@dataclass(frozen=True, slots=True)
class Table:
    """Column titles and cells of a table."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def shown(self) -> set[int]:
        """Indices of the columns that a page shows by default: row names and IMPORTANT columns."""
        return set(sorted(range(len(self.titles)), key=lambda column: _rank(self.titles[column]))[:MAX_SHOWN])


def _rank(title: str) -> int:
    return -1 if title not in COLUMNS else (*IMPORTANT, title).index(title)


def number(value: float | None, digits: int) -> str:
    """Format a number, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """Format a share in per cent, or a dash for None."""
    return "-" if share is None else f"{share:.{digits}%}"


def percentile(values: Distribution | None, name: str, scale: float = 1.0) -> float | None:
    """Return one percentile of a distribution, or None if there is no distribution."""
    return None if values is None else getattr(values, name) * scale


def percentiles(values: Distribution | None, *names: str, scale: float = MS, digits: int = 0) -> str:
    return " / ".join(number(percentile(values, name, scale), digits) for name in names)


def continuity(summary: Summary) -> str:
    """Return the shares of responses with at most 50, 100 and 200 ms of underrun, in per cent."""
    shares = (summary.c50, summary.c100, summary.c200)
    return " / ".join("-" if share is None else f"{100 * share:.1f}".removesuffix(".0") for share in shares)


# Columns of all summary tables. `answers` is the number of samples behind the percentiles.
COLUMNS: dict[str, Callable[[Summary], str]] = {
    "sent": lambda s: str(s.sent),
    "goodput/s": lambda s: number(s.good_per_s, 2),
    "good": lambda s: percent(s.good_share),
    "refused": lambda s: str(s.refused),
    "failed": lambda s: str(s.failed),
    "left": lambda s: str(s.left),
    "answers": lambda s: str(s.succeeded) + (" (few)" if s.too_few else ""),
    "TTFB p50/p95/p99, ms": lambda s: percentiles(s.ttfb_s, "p50", "p95", "p99"),
    "TTFA p50/p95/p99, ms": lambda s: percentiles(s.ttfa_s, "p50", "p95", "p99", digits=1),
    "whole p50/p95, s": lambda s: percentiles(s.end_to_end_s, "p50", "p95", scale=1.0, digits=2),
    "RTF p50": lambda s: number(percentile(s.rtf, "p50"), 2),
    "in time": lambda s: percent(s.request_viability),
    "C50/C100/C200, %": lambda s: continuity(s),
    "underruns": lambda s: str(s.with_underrun),
    "stall p95, ms": lambda s: percentiles(s.stall_s, "p95"),
    "audio s/s": lambda s: number(s.audio_s_per_s, 1),
    "audio in time": lambda s: percent(s.audio_in_time_share),
    "lag p99, ms": lambda s: percentiles(s.scheduling_lag_s, "p99", digits=1) + (" SLOW" if s.client_was_slow else ""),
}
FULL_RATES = (
    *("sent", "answers", "TTFA p50/p95/p99, ms", "whole p50/p95, s", "RTF p50", "audio s/s", "audio in time"),
    *("underruns", "C50/C100/C200, %", "refused", "failed", "lag p99, ms"),
)
OF_KINDS = ("sent", "answers", "TTFA p50/p95/p99, ms", "whole p50/p95, s", "underruns", "refused", "failed", "left")
BRIEF = ("goodput/s", "good", "refused", "failed", "answers", "TTFB p50/p95/p99, ms")  # narrow enough for a terminal


def cells(summary: Summary, titles: Sequence[str] = tuple(COLUMNS)) -> list[str]:
    return [COLUMNS[title](summary) for title in titles]


def rate_table(sweep: Sweep, titles: Sequence[str] = tuple(COLUMNS)) -> Table:
    rows = [[f"{step.rate:.3g}", *cells(step.summary, titles)] for step in sweep.steps]
    return Table(("offered/s", *titles), rows)


def phase_table(phases: Sequence[Result], titles: Sequence[str] = tuple(COLUMNS)) -> Table:
    rows = []
    for each in phases:
        after_s = each.recovered_after_s
        recovered = "no" if after_s is None else f"after {after_s:.0f} s"
        rows.append([each.title, f"{each.rate:.3g}", recovered, *cells(each.summary, titles)])
    return Table(("phase", "offered/s", "recovered", *titles), rows)


def kind_table(runs: Sequence[Result]) -> Table:
    """Build a table with a row for each kind and rate of mixed traffic; empty if all requests are of the same kind."""
    rows = [[f"{run.rate:.3g}", each.title, *cells(each.summary, OF_KINDS)] for run in runs for each in run.by_kind]
    return Table(("offered/s", "kind", *OF_KINDS), rows)


def percentile_table(run: Result) -> Table:
    """Build a table with a row for each distribution and for each stage of the TTFB, in order."""
    summary, stages = run.summary, defaultdict[str, list[float]](list)
    for trace in run.measured:
        for stage, duration_s in (trace.server_timing_s or {}).items():
            stages[stage].append(duration_s)
    rows = {
        "TTFB, ms": summary.ttfb_s,
        "TTFP, ms": summary.ttfp_s,
        "TTFA, ms": summary.ttfa_s,
        "stall, ms": summary.stall_s,
        **({"silence after an interruption, ms": summary.silence_s} if summary.silence_s else {}),
        "RTF": summary.rtf,
        "client lag, ms": summary.scheduling_lag_s,
    } | {f"stage before the first byte: {name}, ms": distribution(times_s) for name, times_s in stages.items()}
    names = ("mean", "p50", "p90", "p95", "p99", "max")
    cells = []
    for name, values in rows.items():
        scale, digits = (MS, 2 if name.startswith("stage") else 1) if name.endswith(", ms") else (1.0, 3)
        count = str(values.count) if values else "0"
        cells.append([name, count, *(number(percentile(values, each, scale), digits) for each in names)])
    return Table(("", "n", *names), cells)


def sweep_verdict(sweep: Sweep) -> str:
    if not sweep.steps:
        return "No rate was measured."
    limits = sweep.steps[0].limits
    capacity, missed = sweep.capacity_per_s, sweep.missed
    asked = f"at least {sweep.plan.held_share:.0%} of the requests good ({limits})"
    if capacity is None:
        lowest = sweep.steps[0]
        ttfb = percentiles(lowest.summary.ttfb_s, "p50", "p95", "p99")
        return (
            f"No measured rate was sustained: even {lowest.rate:.3g} requests/s did not have {asked}; "
            f"{lowest.good_share:.1%} were, TTFB p50/p95/p99 {ttfb} ms. "
            f"Check for other load on the machine, and for tight limits (--max-ttfb, --max-ttfa, --max-stall)."
        )
    there = next(step.summary for step in sweep.steps if step.rate == capacity)
    ttfb = percentiles(there.ttfb_s, "p50", "p95", "p99")
    behind = "." if missed is None else f"; at {missed.rate:.3g} only {missed.good_share:.1%} were."
    most = ", the highest rate tried" if missed is None else ""
    again = [step.rate for step in sweep.steps if missed and step.rate > missed.rate and sweep.plan.held(step)]
    doubt = f" But {max(again):.3g} was sustained, so the measurement was disturbed. Repeat the sweep." if again else ""
    return f"Holds {capacity:.3g} requests/s{most}, TTFB p50/p95/p99 {ttfb} ms: {asked}{behind}{doubt}"


def run_verdict(run: Result) -> str:
    summary, phases = run.summary, run.by_phase
    if summary.good_share is None:
        return "Nothing was sent."
    said = f"{summary.good_share:.1%} of {summary.sent} requests were good ({run.limits})"
    advised = f" ({summary.refused_with_advice} with a retry time)" if summary.refused else ""
    said += f"; {summary.refused} refused{advised}, {summary.failed} failed."
    if len(phases) < 2:
        return said
    last = phases[-1]
    if last.recovered_after_s is None:
        return f"{said} Had not recovered by the end of “{last.title}”."
    return f"{said} Recovered {last.recovered_after_s:.0f} s after the beginning of “{last.title}”."


def warnings(results: Sequence[Result]) -> list[str]:
    summaries = {result.title: result.summary for result in results}
    notes = []
    if slow := [title for title, summary in summaries.items() if summary.client_was_slow]:
        lag_ms = max(percentile(summaries[title].scheduling_lag_s, "p99", MS) or 0.0 for title in slow)
        notes.append(
            f"This client was too slow in {', '.join(slow)}: its p99 lag behind the plan is {lag_ms:.0f} ms, more than "
            f"{MAX_CLIENT_LAG_S * MS:.0f} ms. The server did not receive the planned load. Use --processes, lower "
            f"the rate or run the client on a separate machine."
        )
    if few := [f"{title} ({summary.succeeded})" for title, summary in summaries.items() if summary.too_few]:
        notes.append(
            f"Fewer than {FEW_ANSWERS} answers in {', '.join(few)}: percentiles are not meaningful. Measure longer "
            f"(--duration, --min-requests)."
        )
    if silent := sum(summary.silent_answers for summary in summaries.values()):
        notes.append(f"{silent} responses without an audible sample are excluded from TTFA.")
    return notes


def fact_table(facts: Mapping[str, str]) -> Table:
    return Table(("", ""), list(facts.items()))


def run_facts(run: Result) -> dict[str, str]:
    summary = run.summary
    sent = f"{summary.sent} of {summary.planned} sent" + (", then interrupted" * (summary.sent < summary.planned))
    outcome_left = f", {summary.left} left early" if summary.left else ""
    dropped = f", {summary.interrupted} dropped by the interrupt" if summary.interrupted else ""
    outcome = f"{summary.succeeded} spoken, {summary.refused} refused, {summary.failed} failed{dropped}{outcome_left}"
    facts = {"Requests": f"{sent}: {outcome}"}
    if summary.causes:
        facts["Causes"] = ", ".join(f"{cause}: {count}" for cause, count in summary.causes.items())
    if summary.refusals:
        facts["Refusals"] = "; ".join(f"{count}: {said}" for said, count in summary.refusals.items())
    sent_per_s, share = summary.achieved_per_s, summary.good_share
    good_per_s = None if sent_per_s is None or share is None else sent_per_s * share
    rates = {"asked for": summary.offered_per_s, "drawn": summary.planned_per_s, "sent": sent_per_s, "good": good_per_s}
    facts["Requests/s"] = ", ".join(f"{name} {number(value, 2)}" for name, value in rates.items())
    made = f"{run.audio_made_per_s:.1f} arrived per second while requests were sent"
    facts["Audio"] = f"{summary.audio_s:.1f} s, {number(summary.audio_s_per_s, 2)} audio seconds per second; {made}"
    facts["Underruns"] = f"{summary.underruns} in {summary.with_underrun} of the answers"
    if summary.silence_s is not None:
        silent = percentiles(summary.silence_s, "p50", "p95", "max")
        facts["Interruptions"] = f"{summary.silence_s.count}, silent after p50/p95/max {silent} ms"
    facts["In time"] = (
        f"{percent(summary.chunk_viability, 2)} of chunks, {percent(summary.request_viability)} of answers"
    )
    facts["C50 / C100 / C200"] = f"{continuity(summary)} % of answers with at most 50, 100, 200 ms of underrun"
    return facts
