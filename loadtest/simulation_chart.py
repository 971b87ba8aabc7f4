"""The picture of a simulation. Needs matplotlib."""

import itertools

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from loadtest.chart import MS, Chart, Palette, plain_log
from loadtest.run_charts import MAX_WINDOWS
from loadtest.simulate import Simulated


def simulation_chart(done: Simulated) -> Chart:
    """What a simulated cluster did over time."""
    return Chart(
        "simulation",
        "Simulated cluster over time",
        "Offered rate, TTFB (median and 95th percentile of each window), replicas that run (solid) and are wanted "
        "(dashed).",
        lambda figure, palette: draw_simulation(figure, palette, done),
        height_in=5.2,
    )


def draw_simulation(figure: Figure, palette: Palette, done: Simulated) -> None:
    """See `simulation_chart`."""
    load, latency, replicas = figure.subplots(3, sharex=True)
    end_s = max(done.times_s[-1], 1.0)
    edges = np.linspace(0.0, end_s, MAX_WINDOWS + 1)
    unit_s, unit = (3600.0, "hours") if end_s > 2 * 3600 else (1.0, "seconds")
    middles = (edges[:-1] + edges[1:]) / 2 / unit_s
    counts, _ = np.histogram(done.arrival_s, edges)
    refused, _ = np.histogram(done.arrival_s[np.isnan(done.ttfb_s)], edges)
    load.plot(middles, counts / np.diff(edges), color=palette.good, label="offered")
    load.plot(middles, refused / np.diff(edges), color=palette.refused, label="refused")
    load.set_ylabel("requests/s")
    load.set_ylim(bottom=0)
    load.legend(ncols=2)
    bounds = np.searchsorted(done.arrival_s, edges)
    for percent, colour in ((50, palette.series[0]), (95, palette.series[1])):
        heights = [spoken_percentile(done.ttfb_s[start:end], percent) * MS for start, end in itertools.pairwise(bounds)]
        latency.plot(middles, heights, color=colour, label=f"p{percent}", linewidth=1.2)
    plain_log(latency, "y")
    latency.set_ylabel("TTFB, ms")
    latency.legend(ncols=2)
    times = np.array(done.times_s) / unit_s
    replicas.step(times, done.talkers, where="post", color=palette.series[0], label="talker", linewidth=1.2)
    replicas.step(times, done.talkers_wanted, where="post", color=palette.series[0], linestyle="--", linewidth=0.8)
    if any(done.codecs):
        replicas.step(times, done.codecs, where="post", color=palette.series[2], label="codec", linewidth=1.2)
    replicas.set_ylabel("replicas")
    replicas.set_ylim(bottom=0)
    replicas.legend(ncols=2)
    replicas.set_xlabel(unit)


def spoken_percentile(ttfb_s: NDArray[np.float64], percent: float) -> float:
    """Of the requests that were not refused, NaN without any."""
    spoken = ttfb_s[~np.isnan(ttfb_s)]
    return float(np.percentile(spoken, percent)) if len(spoken) else float("nan")
