from dataclasses import replace

from loadtest.metrics import Summary
from tests.tools.experiments.test_several import row as several_row
from tests.tools.experiments.test_several import spoken
from tools.experiments.gpu.pool import Layout, PlacementRow, application, parsed, table

OPTIONS = ["--model", "embedded", "--out", "results"]


def summary(**changes: object) -> Summary:
    return replace(several_row(spoken()).result.summary, **changes)  # type: ignore[arg-type]


def row(rate: float = 8.0, **changes: object) -> PlacementRow:
    return PlacementRow("pool", Layout(4, 3), "load", rate, summary(**changes))


def test_a_row_that_holds_says_so() -> None:
    assert row().problems == []
    assert table([row()]).splitlines()[-1].startswith("| pool | 4x3 | load | 8 | 1 |")
    assert table([row()]).splitlines()[-1].endswith("| holds |")


def test_a_row_says_what_it_misses() -> None:
    assert row(succeeded=100, with_underrun=2).problems == ["98.0% in time, not 99%"]
    assert row(refused=2).problems == ["2 refused, 0 failed"]
    assert row(4.0).problems == ["TTFA p95 above 90 ms"]  # the answer of the fake trace begins after 0.1 s
    assert row(10.0).problems == []


def test_a_layout_is_a_pool_of_so_many_cores() -> None:
    app = application(parsed(OPTIONS), Layout.parse("4x3"), "pool")
    assert (app.codec.placement, app.codec.workers) == ("pool", 3)
    assert (app.codec_pool.replicas, app.codec_pool.num_cpus) == (4, 3.0)
    assert app.talker_pool.num_gpus == 1.0
    small = application(parsed([*OPTIONS, "--cpu"]), Layout(1, 2), "hybrid")
    assert (small.codec.placement, small.talker.device, small.talker_pool.num_gpus) == ("hybrid", "cpu", 0.0)
