"""`python -m loadtest`: an open-loop load test of an OpenAI-compatible speech server."""

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console

from loadtest.arrivals import Phase, SpeechLengths, Texts, settled
from loadtest.charts import simulation_charts
from loadtest.command_app import CommandApp
from loadtest.comparison import Compared, Side, TurnPlan, compare
from loadtest.comparison_page import leaving_table, overload_table, side_table, verdict, write_comparison
from loadtest.dialects import DIALECTS
from loadtest.measure import Result, measure
from loadtest.metrics import Limits
from loadtest.options import number_list, of_side, positive, side_settings, with_settings
from loadtest.report import Section, read_report, write_page, write_report
from loadtest.settings import Settings
from loadtest.sweep import Plan, read_sweep, sweep
from loadtest.tables import BRIEF, FULL_RATES, fact_table
from loadtest.terminal import Screen, output_console, print_table, show_result, show_sweep, simulated_time
from loadtest.traces import LoadTestError, TraceFolder

T = TypeVar("T")

app = CommandApp("Load-test a speech server. Works with any OpenAI-compatible server.")

Out = Annotated[Path, typer.Option(file_okay=False, help="New folder for the results.")]
MinRequests = Annotated[int, typer.Option(min=0, help="Minimum number of requests at each rate.")]
USUAL_LENGTHS = SpeechLengths(5.7, 0.35)  # typical response lengths
Rate = Annotated[float, typer.Option(callback=positive, help="Requests per second.")]


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Print an expected error to stderr and exit with its code."""
    try:
        yield
    except LoadTestError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from error


def carry_out(work: Coroutine[Any, Any, T]) -> T:
    with explained():
        return asyncio.run(work)


@app.command("run")
@with_settings
def run_command(
    settings: Settings,
    rate: Rate,
    duration: Annotated[float, typer.Option(callback=positive, help="How long to send requests, in seconds.")],
    out: Out,
    settle: Annotated[float, typer.Option(min=0, help="Seconds at the same rate before the measurement.")] = 0.0,
) -> None:
    """Send requests at planned times (open loop) and report how the audio arrived.

    Exit code: 0 if all requests succeed, 1 if any request fails or is refused, 2 for invalid options.
    """
    settings = replace(settings, phases=settled(rate, duration, settle_s=settle))
    result = carry_out(run_once(settings, TraceFolder(out)))
    summary = result.summary
    raise typer.Exit(0 if summary.sent == summary.succeeded + summary.interrupted else 1)


@app.command("step")
@with_settings
def step_command(
    settings: Settings,
    rate: Rate,
    out: Out,
    factor: Annotated[float, typer.Option(callback=positive, help="Load of the step, relative to --rate.")] = 5.0,
    before: Annotated[float, typer.Option(callback=positive, help="Seconds at --rate.")] = 30.0,
    during: Annotated[float, typer.Option(callback=positive, help="Seconds at --factor times --rate.")] = 60.0,
    after: Annotated[float, typer.Option(callback=positive, help="Seconds at --rate again.")] = 60.0,
) -> None:
    """Run a step load to test scaling: --rate, then --factor times --rate, then --rate again."""
    phases = (
        Phase("before", rate, before),
        Phase(f"{factor:g} times as much", rate * factor, during),
        Phase("after", rate, after),
    )
    carry_out(run_once(replace(settings, phases=phases), TraceFolder(out)))


@app.command("overload")
@with_settings
def overload_command(
    settings: Settings,
    rate: Annotated[float, typer.Option(callback=positive, help="Capacity of the server in requests per second.")],
    out: Out,
    factor: Annotated[float, typer.Option(callback=positive, help="Overload, relative to the capacity.")] = 2.0,
    before: Annotated[float, typer.Option(callback=positive, help="Seconds at capacity.")] = 30.0,
    during: Annotated[float, typer.Option(callback=positive, help="Seconds of overload.")] = 60.0,
    relief: Annotated[float, typer.Option(callback=positive, help="Seconds of recovery, not measured.")] = 10.0,
    after: Annotated[float, typer.Option(callback=positive, help="Seconds at capacity again.")] = 30.0,
) -> None:
    """Test recovery from overload: send at capacity, then at --factor times the capacity, then at capacity again."""
    phases = (
        Phase("at capacity", rate, before),
        Phase(f"{factor:g} times capacity", rate * factor, during),
        Phase("relief", rate, relief),
        Phase("at capacity again", rate, after),
    )
    carry_out(run_once(replace(settings, phases=phases), TraceFolder(out)))


@app.command("sweep")
@with_settings
def sweep_command(
    settings: Settings,
    out: Out,
    first_rate: Annotated[float, typer.Option("--from", callback=positive, help="Lowest rate, in requests/s.")] = 1.0,
    max_rate: Annotated[float, typer.Option("--to", callback=positive, help="Highest rate, in requests/s.")] = 100.0,
    factor: Annotated[float, typer.Option(min=1.01, help="Ratio between consecutive rates.")] = 1.5,
    duration: Annotated[float, typer.Option(callback=positive, help="Seconds measured at each rate.")] = 30.0,
    settle: Annotated[float, typer.Option(min=0, help="Seconds at each rate before its measurement.")] = 5.0,
    held: Annotated[float, typer.Option(min=0, max=1, help="Minimum share of good requests to sustain a rate.")] = 0.95,
    collapsed: Annotated[float, typer.Option(min=0, max=1, help="End the sweep at this share of good requests.")] = 0.5,
    refine: Annotated[int, typer.Option(min=0, help="Additional rates between sustained and failed rates.")] = 2,
    most_s: Annotated[float | None, typer.Option("--for", callback=positive, help="Maximum total seconds.")] = None,
    min_requests: MinRequests = 30,
) -> None:
    """Find the capacity: raise the rate until most requests miss a limit.

    If the first rate is too high, the sweep tries lower rates, down to an eighth of the first rate.
    """
    if first_rate > max_rate:
        raise typer.BadParameter(f"--from {first_rate:g} is above --to {max_rate:g}. Swap the two rates")
    plan = Plan(first_rate, max_rate, factor, duration, settle, held, collapsed, refine, min_requests, most_s=most_s)
    carry_out(sweep_rates(settings, plan, TraceFolder(out), titles=(*BRIEF, "RTF p50", "in time", "audio s/s")))


@app.command("rates")
@with_settings
def rates_command(
    settings: Settings,
    rates: Annotated[str, typer.Option(help="Requests per second, such as 1,10,20.")],
    out: Out,
    duration: Annotated[float, typer.Option(callback=positive, help="Seconds measured at each rate.")] = 10.0,
    min_requests: MinRequests = 30,
    settle: Annotated[float, typer.Option(min=0, help="Seconds at each rate before its measurement.")] = 0.0,
) -> None:
    """Measure a list of rates and print a row of percentiles for each rate.

    Exit code: 0 if all requests succeed, else 1.
    """
    given = number_list(rates)
    plan = Plan(duration_s=duration, settle_s=settle, min_requests=min_requests, rates=given)
    spoken = carry_out(sweep_rates(settings, plan, TraceFolder(out), titles=FULL_RATES))
    raise typer.Exit(0 if spoken else 1)


@app.command("report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(exists=True, file_okay=False, help="Folders of runs and sweeps.")],
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Default: `report` in the first folder.")] = None,
    max_ttfb: Annotated[float | None, typer.Option(callback=positive, help="Replace the TTFB limit, in ms.")] = None,
    max_ttfa: Annotated[float | None, typer.Option(callback=positive, help="Replace the TTFA limit, in ms.")] = None,
    max_stall: Annotated[float | None, typer.Option(min=0, help="Replace the stall limit, in ms.")] = None,
) -> None:
    """Write the results to a single page, report.html, which works offline."""
    given = {"ttfb_s": max_ttfb, "ttfa_s": max_ttfa, "stall_s": max_stall}
    stated = {name: limit / 1000 for name, limit in given.items() if limit is not None}
    with explained(), Console(stderr=True).status("reading traces and writing the page"):
        report = read_report(folders, limits=Limits(**stated) if stated else None)
        page = write_report(report, out or folders[0] / "report")
    typer.echo(f"{page}")


@app.command("compare")
def compare_command(
    first: Annotated[str, typer.Argument(metavar="A", help="DIALECT=URL, such as talkray=http://127.0.0.1:8000.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The same: " + ", ".join(DIALECTS) + ".")],
    rate: Rate,
    out: Out,
    duration: Annotated[float, typer.Option(callback=positive, help="Duration of each turn, in seconds.")] = 20.0,
    settle: Annotated[float, typer.Option(min=0, help="Seconds of load before each turn, not measured.")] = 2.0,
    turns: Annotated[int, typer.Option(min=1, help="Turns per server. A verdict requires at least 3.")] = 3,
    overload: Annotated[float, typer.Option(min=0, help="Final overload, relative to --rate. 0: none.")] = 4.0,
    overload_s: Annotated[float, typer.Option(callback=positive, help="Seconds of overload.")] = 10.0,
    words: Annotated[int, typer.Option(min=0, max=50, help="Responses to transcribe per server.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed for times and texts.")] = 0,
    texts: Annotated[Texts, typer.Option(help="Texts for both servers.")] = Texts.MIXED,
    voices: Annotated[list[str] | None, typer.Option("--voice", help="Voice of A. Repeat for B.")] = None,
    models: Annotated[list[str] | None, typer.Option("--model", help="Model of A. Repeat for B.")] = None,
    extras: Annotated[list[str] | None, typer.Option("--extra", metavar="JSON", help="For A. Repeat for B.")] = None,
    headers_a: Annotated[list[str] | None, typer.Option("--header-a", help="Header such as 'xi-api-key: KEY'.")] = None,
    headers_b: Annotated[list[str] | None, typer.Option("--header-b", help="Header for B.")] = None,
    speech_s: Annotated[float | None, typer.Option(callback=positive, help="Median seconds, Talkray only.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests to each server before its first turn.")] = 3,
) -> None:
    """Compare two servers in alternating turns with the same texts and arrivals, and write a report page.

    Exit code: 0 if both servers were measured.
    """
    shared: dict[str, Any] = {"seed": seed, "texts": texts, "warmup": warmup}
    sides = [
        Side(
            letter,
            side_settings(
                said,
                voice=of_side(voices, number, "alloy"),
                model=of_side(models, number, "tts-1"),
                extra=of_side(extras, number, "{}"),
                headers=headers or [],
                speech_s=speech_s,
                **shared,
            ),
        )
        for number, (letter, said, headers) in enumerate((("A", first, headers_a), ("B", second, headers_b)))
    ]
    plan = TurnPlan(rate, duration, settle, turns, overload, overload_s, words)
    done = carry_out(compare_sides(sides, plan, out))
    page = write_comparison(done, plan, out)
    console = output_console()
    print_table(side_table(done, plan), console)
    if plan.overload:
        print_table(overload_table(done), console)
    print_table(leaving_table(done), console)
    console.print(f"[bold]{verdict(done, plan)}[/]", highlight=False)
    typer.echo(f"\nThe traces of every turn are in {out}. Open {page}.")


@app.command("simulate")
def simulate_command(
    learn_from: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Sweep of one talker replica.")],
    rate: Rate,
    gpus: Annotated[int, typer.Option(min=1, help="Maximum number of talker replicas, with one GPU each.")] = 100,
    warm: Annotated[int, typer.Option(min=0, help="Talker replicas at start.")] = 1,
    shape: Annotated[Literal["steady", "day"], typer.Option(help="day: a fifth of --rate at night.")] = "steady",
    duration: Annotated[float | None, typer.Option(callback=positive, help="Default: an hour or a day.")] = None,
    speech_s: Annotated[float, typer.Option(callback=positive, help="Median seconds.")] = USUAL_LENGTHS.median_s,
    speech_sigma: Annotated[float, typer.Option(min=0, help="Sigma of the log-normal lengths.")] = USUAL_LENGTHS.sigma,
    settings: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="YAML: policies, nodes, prices, losses."),
    ] = None,
    max_ttfb: Annotated[float, typer.Option(callback=positive, help="Maximum TTFB of a good request, in ms.")] = 500.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed for traffic, lengths and losses.")] = 0,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="New folder for numbers and charts.")] = None,
) -> None:
    """Predict p95 latency and cost of a cluster under the production policies, from a measured sweep."""
    # Imported here, because only the simulator needs the server's code (the policies).
    from loadtest import scenario
    from loadtest.service_model import ServiceModel, observe
    from loadtest.simulate import Simulation, simulation_facts, simulation_record

    traffic_s = duration or (scenario.DAY_S if shape == "day" else scenario.HOUR_S)
    with explained():
        if out is not None:
            TraceFolder(out).check_unused()
        steps = read_sweep(TraceFolder(learn_from)).steps
        model = ServiceModel.learn([one for step in steps for one in observe(step.traces)])
        cluster = scenario.read_cluster(model, settings, gpus=gpus)
    lengths = SpeechLengths(speech_s, speech_sigma)
    traffic = scenario.draw_traffic(shape, rate, duration_s=traffic_s, lengths=lengths, seed=seed)
    step_s = scenario.usual_step_s(model, traffic)
    simulation = Simulation(cluster, traffic, seed=seed, warm=min(warm, gpus), step_s=step_s)
    with simulated_time(f"simulating {len(traffic.frames)} requests", traffic_s, Console(stderr=True)) as show:
        done = simulation.run(show)
    facts = fact_table(simulation_facts(done, Limits(ttfb_s=max_ttfb / 1000)))
    print_table(facts, output_console())
    if out is not None:
        TraceFolder(out).write_json("simulation.json", simulation_record(done))
        section = Section(f"{rate:g} requests/s, {shape}", facts, simulation_charts(done))
        page = write_page(out, "Simulated cluster", verdicts={}, notes=[], sections=[section])
        typer.echo(f"Results are in {out}. Open {page}.")


@app.command("simulate-codec")
def simulate_codec_command(
    rates: Annotated[str, typer.Option(help="Requests per second, such as 4,8,10.")] = "4,8,10",
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of the pool.")] = 16,
    workers: Annotated[int, typer.Option(min=1, help="Workers of each replica, with one core each.")] = 1,
    call_ms: Annotated[float, typer.Option(min=0, help="Fixed duration of a decode call.")] = 15.0,
    frame_ms: Annotated[float, typer.Option(callback=positive, help="Additional duration per frame.")] = 4.6,
    crowded: Annotated[float, typer.Option(min=0, help="Relative slowdown while all workers are busy.")] = 0.0,
    hybrid: Annotated[bool, typer.Option("--hybrid", help="Decode the first frames on the GPU.")] = False,
    of_two: Annotated[bool, typer.Option("--of-two", help="Use Ray Serve's default router.")] = False,
    patience_s: Annotated[float, typer.Option(min=0, help="Maximum time that a stream waits for admission.")] = 0.5,
    duration: Annotated[float, typer.Option(callback=positive, help="Seconds at each rate.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed for traffic, lengths and call durations.")] = 1,
) -> None:
    """Simulate a pool of codec replicas on CPU cores."""
    from loadtest import codec_pool, scenario  # imported late, as in `simulate`

    pool = codec_pool.CodecPool(
        replicas=replicas,
        workers=workers,
        call_s=call_ms / 1000,
        frame_s=frame_ms / 1000,
        crowded=crowded,
        hybrid=hybrid,
        of_two=of_two,
        patience_s=patience_s,
        seed=seed,
    )
    served = {}
    for rate in number_list(rates):
        with Console(stderr=True).status(f"simulating {rate:g} requests/s"):
            traffic = scenario.draw_traffic("steady", rate, duration_s=duration, lengths=USUAL_LENGTHS, seed=seed)
            served[rate] = codec_pool.serve(pool, traffic)
    print_table(codec_pool.served_table(served), output_console())


@app.command("check-simulation")
@with_settings
def check_simulation_command(
    settings: Settings,
    rate: Annotated[float, typer.Option(callback=positive, help="Capacity of the server in requests per second.")],
    out: Out,
    slots: Annotated[int, typer.Option(min=1, help="Maximum batch size of the server's talker.")] = 8,
    requests: Annotated[int, typer.Option(min=5, help="Requests per turn.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="How many times to run all turns.")] = 6,
) -> None:
    """Check the simulator against a server with one talker replica, at 30, 60 and 90 % of the server's capacity.

    Exit code: 0 if each predicted p95 is within 20 % of the measured p95, else 1.
    """
    from loadtest import check  # imported late, as in `simulate`

    phases = check.check_phases(rate, requests=requests, rounds=rounds)
    result = carry_out(run_once(replace(settings, phases=phases), TraceFolder(out)))
    with explained(), Console(stderr=True).status("simulating the same arrivals"):
        compared = check.compare(result, slots=slots)
    TraceFolder(out).write_json("comparison.json", {"rows": [asdict(row) | {"error": row.error} for row in compared]})
    print_table(check.comparison_table(compared), output_console())
    raise typer.Exit(0 if all(row.holds for row in compared) else 1)


async def run_once(settings: Settings, folder: TraceFolder) -> Result:
    """Run the test once. Show progress on the terminal and write the results to disk."""
    screen = Screen(Console(stderr=True))
    async with screen.shown():
        result, _ = await measure(settings, folder, show=screen.show)
    show_result(result, output_console())
    say_where(folder)
    return result


async def sweep_rates(settings: Settings, plan: Plan, folder: TraceFolder, *, titles: Sequence[str]) -> bool:
    """Measure one rate after another. Return whether every request succeeded."""
    screen = Screen(Console(stderr=True))
    async with screen.shown():
        done, is_complete = await sweep(settings, plan, folder=folder, show=screen.show, done=screen.done)
    show_sweep(done, titles, output_console())
    if done.is_cut_short:
        typer.echo(f"--for {plan.most_s:g} ended the sweep. Increase --for to try more rates.")
    say_where(folder)
    return is_complete and all(step.summary.succeeded == step.summary.sent for step in done.steps)


async def compare_sides(sides: Sequence[Side], plan: TurnPlan, out: Path) -> list[Compared]:
    """Measure both servers. Show progress on the terminal and write the results to disk."""
    screen = Screen(Console(stderr=True))
    async with screen.shown():
        return await compare(sides, plan, folder=out, show=screen.show)


def say_where(folder: TraceFolder) -> None:
    """Print where the results were written, and the commands that read them."""
    python = Path(sys.executable)  # absolute, because the shell's `python` may be missing or different
    shown = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    typed = os.environ.get("TALKRAY_TYPED") or f"{shlex.quote(str(shown))} -m loadtest"
    typer.echo(f"\nResults are in {folder.path}. Report: {typed} report {shlex.quote(str(folder.path))}")


if __name__ == "__main__":
    app(prog_name="talkray loadtest")
