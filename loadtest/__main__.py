"""`python -m loadtest run`: an open-loop load test of an OpenAI-compatible speech server."""

import asyncio
import json
import math
import os
import platform
import shlex
import signal
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import urlsplit

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from loadtest import corpus
from loadtest.arrivals import Arrivals
from loadtest.clients import AudioFormat, Target, check_reachable, open_session
from loadtest.metrics import MAX_CLIENT_LAG_S, Distribution, Summary, summarize
from loadtest.runner import Runner, Settings, WarmupFailedError, show_progress
from loadtest.traces import RunExistsError, RunFolder

MS = 1000.0

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class UnreachableError(Exception):
    """Nothing answers at the URL."""


@app.callback()
def loadtest() -> None:
    """Measure how a speech server holds up under load. Works with any OpenAI-compatible server."""


def positive(value: float) -> float:
    """Option check: a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise typer.BadParameter("must be a number above 0")
    return value


def http_url(value: str) -> str:
    """Option check: an absolute HTTP URL."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise typer.BadParameter(f"{value!r} is not a URL such as http://127.0.0.1:8000")
    return value


def extra_fields(value: str) -> dict[str, object]:
    """The value of --extra: a JSON object of body fields that the load test does not set itself."""
    try:
        extra = json.loads(value)
    except ValueError as error:
        raise typer.BadParameter(f"not valid JSON: {error}", param_hint="--extra") from error
    if not isinstance(extra, dict):
        raise typer.BadParameter("""must be a JSON object such as '{"seed": 1}'""", param_hint="--extra")
    if reserved := {"input", "response_format"} & extra.keys():
        names = " and ".join(sorted(reserved))
        raise typer.BadParameter(f"{names}: the load test sets this itself (see --format)", param_hint="--extra")
    return extra


@app.command()
def run(
    url: Annotated[str, typer.Option(callback=http_url, help="Server, such as http://127.0.0.1:8000.")],
    rate: Annotated[float, typer.Option(callback=positive, help="Requests per second.")],
    duration: Annotated[float, typer.Option(callback=positive, help="Seconds during which requests are sent.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="New folder for the results.")],
    seed: Annotated[int, typer.Option(min=0, help="Settles times and texts.")] = 0,
    arrivals: Annotated[Arrivals, typer.Option(help="Exponential or equal gaps.")] = Arrivals.POISSON,
    voice: Annotated[str, typer.Option(help="Field of every request.")] = "alloy",
    model: Annotated[str, typer.Option(help="Field of every request.")] = "tts-1",
    audio_format: Annotated[AudioFormat, typer.Option("--format", help="response_format.")] = AudioFormat.PCM,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the run, one by one, not in its numbers.")] = 0,
    timeout: Annotated[float, typer.Option(callback=positive, help="Seconds a whole answer may take.")] = 120.0,
    extra: Annotated[str, typer.Option(metavar="JSON", help="More fields for every request.")] = "{}",
) -> None:
    """Send requests at planned times, whatever becomes of them, and say how the audio arrived.

    Exit code: 0 if every request was spoken, 1 if any failed or was refused, 2 if called wrongly.
    """
    settings = Settings(
        url=url,
        rate=rate,
        duration_s=duration,
        arrivals=arrivals,
        seed=seed,
        audio_format=audio_format,
        options={"model": model, "voice": voice} | extra_fields(extra),
        warmup=warmup,
        timeout_s=timeout,
    )
    try:
        summary = asyncio.run(measure(settings, RunFolder(out)))
    except RunExistsError as error:
        fail(str(error), exit_code=2)
    except (UnreachableError, WarmupFailedError) as error:
        fail(str(error), exit_code=1)
    typer.echo(f"\nResults are in {out}")
    raise typer.Exit(0 if summary.sent == summary.succeeded + summary.interrupted else 1)


def fail(message: str, *, exit_code: int) -> NoReturn:
    """Say on stderr what is wrong and leave."""
    typer.echo(message, err=True)
    raise typer.Exit(exit_code)


async def measure(settings: Settings, folder: RunFolder) -> Summary:
    """The whole run, from the look at the server to the table. Ctrl-C ends it early and keeps what was measured."""
    schedule = settings.schedule()
    if not schedule:
        raise typer.BadParameter("not one request falls into the run: raise --rate or --duration, or change --seed")
    folder.check_unused()
    await check_server(settings.target)
    folder.write_schedule(schedule)
    folder.write_json("run.json", describe(settings))
    runner = Runner(settings.target, schedule, folder=folder)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, runner.interrupt)
    progress = asyncio.create_task(show_progress(runner.progress, Console(stderr=True)))
    try:
        whole = await runner.run(warmup=corpus.choose(settings.warmup, seed=settings.seed))
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        progress.cancel()
        await asyncio.wait([progress])
    summary = summarize(runner.traces, planned=len(schedule))
    folder.write_json("summary.json", asdict(summary) | {"client_was_slow": summary.client_was_slow})
    show_summary(summary, Console(), whole=whole)
    return summary


async def check_server(target: Target) -> None:
    """Raises UnreachableError, with advice, unless something answers."""
    try:
        async with open_session() as session:
            await check_reachable(session, target)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnreachableError(
            f"Nothing answers at {target.base_url} ({error or type(error).__name__}).\n"
            f"Start the server and wait until it is ready, or correct --url. Nothing was sent and nothing written."
        ) from error


def describe(settings: Settings) -> dict[str, object]:
    """What run.json says: enough to run the same again."""
    try:
        own_version = version("talkray")
    except PackageNotFoundError:
        own_version = "not installed"
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": settings.url,
        "command": shlex.join(["python", "-m", "loadtest", *sys.argv[1:]]),
        "settings": asdict(settings),
        "versions": {
            "talkray": own_version,
            "python": platform.python_version(),
            "aiohttp": version("aiohttp"),
            "numpy": version("numpy"),
        },
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
    }


def show_summary(summary: Summary, console: Console, *, whole: bool) -> None:
    """The final lines and the table of percentiles."""
    console.print(facts_table(summary, whole=whole))
    console.print(percentile_table(summary))
    for warning in warnings(summary):
        console.print(f"[bold yellow]Note:[/] {warning}", highlight=False)


def facts_table(summary: Summary, *, whole: bool) -> Table:
    """Counts, rates and playback, a line each."""
    facts = Table.grid(padding=(0, 2))
    sent = f"{summary.sent} of {summary.planned} sent" + ("" if whole else ", then interrupted")
    dropped = f", {summary.interrupted} dropped by the interrupt" if summary.interrupted else ""
    outcome = f"{summary.succeeded} spoken, {summary.refused} refused, {summary.failed} failed{dropped}"
    facts.add_row("Requests", f"{sent}: {outcome}")
    if summary.causes:
        facts.add_row("Causes", ", ".join(f"{cause}: {count}" for cause, count in summary.causes.items()))
    rates = {"planned": summary.offered_per_s, "sent": summary.achieved_per_s, "spoken": summary.completed_per_s}
    facts.add_row("Requests/s", ", ".join(f"{name} {number(value, 2)}" for name, value in rates.items()))
    facts.add_row("Audio", f"{summary.audio_s:.1f} s, {number(summary.audio_s_per_s, 2)} audio seconds per second")
    if playback := summary.continuity:
        facts.add_row("Underruns", f"{playback.underruns} in {playback.underrun_share:.1%} of the answers")
        viable = f"{playback.chunk_viability:.2%} of chunks, {playback.request_viability:.1%} of answers"
        facts.add_row("In time", viable)
    return facts


def percentile_table(summary: Summary) -> Table:
    """Distributions, a row each."""
    table = Table("", "n", "mean", "p50", "p90", "p95", "p99", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for title, values, scale in distributions(summary):
        if values is None:
            table.add_row(title, "0", *"------")
            continue
        cells = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
        table.add_row(title, str(values.count), *(number(cell * scale, 1 if scale == MS else 3) for cell in cells))
    return table


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


if __name__ == "__main__":
    app()
