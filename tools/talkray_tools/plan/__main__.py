"""`talkray plan`: compute how many nodes and replicas a load needs, and write a configuration file for them.

Every line names the source of its number: measured (with host, date and commit), estimated from a measurement,
simulated from measured or estimated rates, or given by the user.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from deployments.errors import InvalidRequest, TalkrayError
from loadtest.metrics import Limits
from loadtest.options import positive
from loadtest.simulate import Simulated
from loadtest.tables import Table
from loadtest.terminal import print_table, simulated_time
from loadtest.traces import LoadTestError
from serve_app.cli.main import ONE_GPU
from serve_app.config import AppConfig
from serve_app.config_file import read_config
from talkray_tools.arguments import run_command
from talkray_tools.plan.measure import gpu_names, measure_table
from talkray_tools.plan.sizing import HOURS_A_MONTH, Demand, Sizing
from talkray_tools.plan.tables import CPU, choose, known_gpu, read_table, shipped

MODELS = ("embedded", "0.6B-Base", "0.6B-CustomVoice", "1.7B-Base", "1.7B-CustomVoice", "1.7B-VoiceDesign")
_INGRESSES = 2  # per talker, as in the measurements
_EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a plan: a value and its source."""

    what: str
    value: str
    source: str


def plan(
    calls: Annotated[float | None, typer.Option(callback=positive, help="Peak number of simultaneous calls.")] = None,
    rate: Annotated[float | None, typer.Option(callback=positive, help="Or: peak requests per second.")] = None,
    speaks: Annotated[float, typer.Option(min=0.01, max=1, help="Share of a call with speech.")] = 0.5,
    speech_s: Annotated[float, typer.Option(callback=positive, help="Mean seconds of speech per response.")] = 6.0,
    p95: Annotated[float, typer.Option("--p95", callback=positive, help="Target p95 of TTFA, in ms.")] = 200.0,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "1.7B-CustomVoice",
    gpu: Annotated[str | None, typer.Option(help="GPU such as H100, or none. Default: this machine's.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Default: this machine's, or 1.")] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="CPU cores of a node. Default: this machine's.")] = None,
    spare: Annotated[int, typer.Option(min=0, help="Nodes that may fail without missing the target.")] = 1,
    price: Annotated[float | None, typer.Option(min=0, help="Price of a node per hour, in your currency.")] = None,
    whole_day: Annotated[
        bool, typer.Option("--whole-day", help="Simulate a complete day, instead of some seconds of each minute.")
    ] = False,
    table: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="Table from --measure. Repeatable.")
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Measure this machine for two minutes, to this new file.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Server for --measure. Default: a new one.")] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="New file for the configuration.")] = None,
) -> None:
    """Compute nodes, replicas and cost for a load, and the capacity that remains if a node fails."""
    _check(calls=calls, rate=rate, model=model, out=out)
    here = gpu_names()
    kind = known_gpu(gpu or (here[0] if here else CPU))
    per_node = gpus_per_node or (1 if gpu or not here else len(here))
    of_node = cores or os.cpu_count() or 1
    demand = Demand(rate or (calls or 0) * speaks / speech_s, speech_s, p95)
    tables = [*map(read_table, table or ()), *shipped()]
    if measure is not None:
        tables.insert(0, measure_table(measure, model=model, gpu=kind, url=url, speech_s=speech_s, p95_ms=p95))
    basis = choose(tables, model=model, gpu=kind, cores=of_node // per_node)
    sizing = Sizing(demand, basis, per_node, spare)
    sizing.carried  # noqa: B018, rejects impossible demands before a day is simulated
    length_s = 86400.0 if whole_day else sizing.short_day_s()
    with simulated_time("simulating a day", length_s, Console(stderr=True)) as show:
        day = sizing.day(show, day_s=length_s)
    asked = f"{calls:g} calls with speech {speaks:.0%} of the time" if calls else "given"
    figures = [
        Figure("asked for", f"{demand.rate:.2f} requests/s, {demand.audio_per_s:.1f} s of audio per second", asked),
        _replica(sizing),
        *_sizes(sizing, kind),
        *_checks(sizing, day, length_s),
        *_costs(sizing, price),
    ]
    _show(figures)
    if out is not None:
        notes = [f"{each.what}: {each.value} ({each.source})" for each in figures]
        write_config(sizing, model=model, gpu=kind, file=out, notes=["Made by `talkray plan`.", *notes])
        how = "talkray serve --config" if sizing.nodes == 1 else "serve deploy"
        print(f"\n{out} is ready: {how} {out}")


def _show(figures: Sequence[Figure]) -> None:
    """Print the plan. Symbols stand for the sources of the numbers, so that 80 columns are enough."""
    marks = {source: f"[{number}]" for number, source in enumerate(dict.fromkeys(each.source for each in figures), 1)}
    console = Console()  # 80 columns wide unless stdout is a terminal
    print_table(Table(("", "", ""), [(each.what, each.value, marks[each.source]) for each in figures]), console)
    console.print()
    print_table(Table(("", ""), [(mark, source) for source, mark in marks.items()]), console)


def _check(*, calls: float | None, rate: float | None, model: str, out: Path | None) -> None:
    """Validate the options before any slow work. Raises `InvalidRequest`."""
    if (calls is None) == (rate is None):
        raise InvalidRequest("set the peak load with either --calls or --rate")
    if model not in MODELS:
        raise InvalidRequest(f"--model {model}: the model is unknown. Use one of: {', '.join(MODELS)}")
    if out is not None and out.exists():
        raise InvalidRequest(f"--out {out}: the file already exists. Name a new file, or move the file away")


def _replica(sizing: Sizing) -> Figure:
    """Return the plan's line about one replica, on which the other lines are based."""
    basis = sizing.basis
    rows = [row for row in basis.table.rows if row.is_carried and not row.is_held_out]
    first, last = rows[0], rows[-1]
    shown = f"first audio p95 {first.first_audio_ms[95]:.0f} ms at {first.rate:g} requests/s"
    if last is not first:
        shown += f", {last.first_audio_ms[95]:.0f} ms at {last.rate:g}"
    on = "CPUs" if basis.table.gpu == CPU else basis.table.gpu
    return Figure("basis", f"one replica on {on}: {shown}", basis.source)


def _simulated(sizing: Sizing) -> str:
    return f"simulated from {'estimated' if sizing.basis.reasons else 'measured'} rates of one replica"


def _sizes(sizing: Sizing, gpu: str) -> Iterator[Figure]:
    simulated = _simulated(sizing)
    most = ", the highest measured rate" if sizing.carried == sizing.most_per_replica else ""
    on = "cores" if gpu == CPU else gpu
    yield Figure(
        "replica capacity", f"{sizing.carried:.1f} requests/s with p95 {sizing.demand.p95_ms:g} ms{most}", simulated
    )
    yield Figure("replicas needed", f"{sizing.needed} (talkers on {on})", simulated)
    spare = f"{sizing.spare_nodes} of them spare" if sizing.spare_nodes else "no spare"
    yield Figure("nodes", f"{sizing.nodes} with {sizing.gpus_per_node} replica(s) each, {spare}", simulated)


def _checks(sizing: Sizing, day: Simulated, length_s: float) -> Iterator[Figure]:
    demand, source = sizing.demand, _simulated(sizing)
    times = [day.ttfb_percentile_s(percent) for percent in (50, 95, 99)]
    shown = " / ".join("-" if each is None else f"{1000 * each:.0f}" for each in times)
    good = float((day.ttfb_s <= Limits(ttfb_s=demand.p95_ms / 1000).ttfb_s).sum()) / max(1, len(day.ttfb_s))
    each = "all of it" if length_s >= 86400 else f"each minute for {length_s / 1440:.1f} s"
    yield Figure(
        "over a day",
        f"first audio p50/p95/p99 {shown} ms, {day.refused} of {len(day.ttfb_s)} refused, {good:.1%} within the target",
        f"{source}; a fifth of the rate at night, {each}",
    )
    busiest = sizing.outcome(sizing.replicas, demand.rate)
    yield Figure("at peak load", f"first audio p95 {busiest.p95_ms:.0f} ms", source)
    left = sizing.replicas_left
    if not left:
        yield Figure("when a node dies", "no speech until it is back. --spare 1 adds a node", "by the sizes")
        return
    after = sizing.outcome(left, demand.rate)
    room = left * sizing.carried / demand.rate - 1
    verdict = "holds" if after.holds(demand) else "MISSES the limit"
    yield Figure(
        "when a node dies",
        f"p95 {after.p95_ms:.0f} ms, {after.refused:.1%} refused, {after.late:.1%} slower than playback: {verdict}; "
        f"{room:+.0%} requests/s of headroom",
        f"{source}, on the remaining {left} replica(s)",
    )


def _costs(sizing: Sizing, price: float | None) -> Iterator[Figure]:
    if price is None:
        return
    an_hour = sizing.nodes * price
    yield Figure("cost", f"{an_hour:.2f} per hour, {an_hour * HOURS_A_MONTH:,.0f} per month", "your price of a node")
    spoken_h = sizing.demand.audio_per_s
    yield Figure("cost of an hour of speech", f"{an_hour / spoken_h:.4f} at peak load", "your price of a node")


def write_config(sizing: Sizing, *, model: str, gpu: str, file: Path, notes: Sequence[str]) -> AppConfig:
    """Write and load the configuration for `talkray serve --config` or, with several nodes, `serve deploy`.

    Raises `FileExistsError` if the file exists, because it may contain edits.
    """
    comment = "".join(f"# {note}\n" for note in notes)
    document = yaml.safe_dump(_document(sizing, model=model, gpu=gpu), sort_keys=False)
    with file.open("x", encoding="utf-8") as written:
        written.write(comment + document)
    return read_config(file)


def _document(sizing: Sizing, *, model: str, gpu: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(ONE_GPU.read_text(encoding="utf-8"))
    application = document["applications"][0]
    arguments = application["args"]
    arguments["model"] = model if model == _EMBEDDED else f"Qwen/Qwen3-TTS-12Hz-{model}"
    arguments["talker"]["max_num_seqs"] = sizing.basis.table.max_num_seqs
    sizes = {"Ingress": _INGRESSES * sizing.replicas, "Talker": sizing.replicas, "Codec": max(1, sizing.replicas // 2)}
    if gpu == CPU:
        for name in ("codec", "codec_pool", "talker_pool"):
            arguments.pop(name)
        arguments["talker"] = {"max_num_seqs": sizing.basis.table.max_num_seqs}
        sizes = {"Ingress": sizing.nodes, "Talker": sizing.replicas, "Codec": sizing.replicas}
    application["deployments"] = [{"name": name, "num_replicas": size} for name, size in sizes.items()]
    if sizing.nodes > 1:
        document["http_options"]["host"] = "0.0.0.0"
        arguments["api"] = {"access": {"keys_file": "/etc/talkray/keys.json"}}
    return document


def main(arguments: list[str]) -> int:
    """Run the command. Talkray's own errors are printed without a traceback."""
    try:
        return run_command(plan, "talkray plan", arguments)
    except (TalkrayError, LoadTestError) as error:
        sys.stderr.write(f"talkray plan: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
