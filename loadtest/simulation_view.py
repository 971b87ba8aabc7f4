"""What a person sees of a simulation: its facts, and its check against a server."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from loadtest.check import Comparison
from loadtest.metrics import Limits
from loadtest.simulate import Simulated
from loadtest.terminal import MS, right_aligned


def comparison_table(rows: Sequence[Comparison]) -> Table:
    """Measured and predicted, a row for each share of capacity."""
    table = right_aligned("of capacity", "requests", "TTFB p95 measured", "90 % interval", "simulated", "error", "")
    for row in rows:
        interval = f"{row.measured_low_s * MS:.0f} to {row.measured_high_s * MS:.0f} ms"
        measured, simulated = f"{row.measured_s * MS:.0f} ms", f"{row.simulated_s * MS:.0f} ms"
        verdict = "within 20 %" if row.holds else "off"
        table.add_row(
            f"{row.share:.0%}", str(row.requests), measured, interval, simulated, f"{row.error:+.0%}", verdict
        )
    return table


def simulation_table(done: Simulated, limits: Limits) -> Table:
    """What a simulated cluster did."""
    table = Table.grid(padding=(0, 2))
    for name, value in simulation_facts(done, limits).items():
        table.add_row(name, value)
    return table


def simulation_facts(done: Simulated, limits: Limits) -> dict[str, str]:
    """The lines of the table."""
    total = len(done.ttfb_s)
    good = int((done.ttfb_s <= limits.ttfb_s).sum())  # NaN, a refusal, is not
    percentiles = (done.ttfb_percentile_s(percent) for percent in (50, 95, 99))
    return {
        "Requests": f"{total}, {done.refused} refused ({done.refused / max(1, total):.2%})",
        "TTFB p50, p95, p99": ", ".join("-" if value is None else f"{value * MS:.0f} ms" for value in percentiles),
        "Good": f"{good / max(1, total):.2%} with TTFB at most {limits.ttfb_s * MS:g} ms",
        "Slower than playback": f"{np.mean(done.rtf > 1):.2%} of the requests",
        "Talker replicas": f"{min(done.talkers)} to {max(done.talkers)}, mean {np.mean(done.talkers):.1f}",
        "Codec replicas": f"{min(done.codecs)} to {max(done.codecs)}, mean {np.mean(done.codecs):.1f}",
        "Node hours": f"{done.node_hours:.1f}, cost {done.cost:.2f}",
        "Nodes lost": f"{done.nodes_lost}, {done.streams_moved} streams moved",
    }


def simulation_record(done: Simulated) -> dict[str, object]:
    """What simulation.json says: the percentiles, and the pools over time."""
    return {
        "requests": len(done.ttfb_s),
        "refused": done.refused,
        "ttfb_s": {f"p{percent}": done.ttfb_percentile_s(percent) for percent in (50, 90, 95, 99)},
        "node_hours": done.node_hours,
        "cost": done.cost,
        "nodes_lost": done.nodes_lost,
        "streams_moved": done.streams_moved,
        "times_s": done.times_s,
        "talkers": done.talkers,
        "talkers_wanted": done.talkers_wanted,
        "codecs": done.codecs,
        "streams": done.streams,
    }
