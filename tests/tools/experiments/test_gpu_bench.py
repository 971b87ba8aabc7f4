from dataclasses import replace

import pytest

from loadtest.arrivals import Phase, ScheduledRequest, place
from loadtest.measure import Result
from loadtest.metrics import Limits
from loadtest.traces import Failure, PcmLayout, Trace
from tests.loadtest.test_metrics import RATE, SPOKEN
from tools.experiments.gpu import pool, several
from tools.experiments.gpu.bench import Interruption, Row, interruption, say_problems, table

OPTIONS = ["--model", "embedded", "--out", "results"]
CHUNKS = [(0.1, 48_000), (0.2, 96_000)]  # two seconds, in time
HEARD = Trace(0, 0.0, 0.001, frames=25, chunks=CHUNKS, first_byte_s=0.1, finished_s=0.2, num_bytes=96_000)


def spoken(**changes: object) -> Trace:
    trace = replace(HEARD, layout=PcmLayout(24_000), audible_sample=0, status=200)
    return replace(trace, **changes)


def row(*traces: Trace, **changes: object) -> Row:
    result = Result("run", {}, place([Phase("measured", 1.0, 9.0)]), Limits(), list(traces), [], len(traces))
    return replace(Row("inline, 2 talkers", 81.0, result), **changes)


REFUSED = spoken(failure=Failure.REFUSED, chunks=[], first_byte_s=None)


@pytest.mark.parametrize(("made", "problems"), [
    (row(spoken()), []),
    (row(spoken(), spoken(chunks=[(0.1, 48_000), (3.0, 96_000)], finished_s=3.0)), ["50.0% in time, not 98%"]),
    (row(spoken(sent_s=0.02)), ["the client was 20.0 ms late: more --processes"]),
    (row(spoken(), REFUSED, what="talker killed"), []),  # under a fault only what is lost counts
    (row(spoken(), what="talker killed", lost=1), ["1 not whole"]),
])  # fmt: skip
def test_a_row_says_what_it_misses(made: Row, problems: list[str]) -> None:
    assert made.problems == problems
    said = table([made]).splitlines()[-1]
    assert said.startswith(f"| inline, 2 talkers | {made.what} | 81 | ")
    assert said.endswith(f"| {problems[0] if problems else 'holds'} |")


def test_a_row_says_what_listeners_had_of_a_fault() -> None:
    found = [Interruption(0.3, 0.1, 0.0), Interruption(0.062, 0.514, 0.2), Interruption(0.4, 0.2, 0.0)]
    assert row(interrupted=found).note == (
        "3 streams under way: next audio after 200 ms, at most 514; at least 62 ms in hand; 1 paused"
    )
    assert row().note == ""


def test_streams_without_all_of_their_audio_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    planned = [ScheduledRequest(number, 0.0, "Hello.", frames) for number, frames in ((0, 25), (1, 26), (2, 25))]
    traces = [spoken(), spoken(index=1, request_id="short"), spoken(index=2, failure=Failure.HTTP, error="500")]
    assert say_problems(traces, planned) == 2
    assert "short: 25 frames, 26 were asked for" in capsys.readouterr().out


def heard(*arrivals_s: float) -> Trace:
    """A stream of 0.1 s of audio at each of these times."""
    chunks = tuple((at_s, 2 * RATE // 10 * number) for number, at_s in enumerate(arrivals_s, start=1))
    return replace(SPOKEN, chunks=chunks)


@pytest.mark.parametrize(("arrivals_s", "moment_s", "buffered_s", "next_s", "heard_s"), [
    ((1.0, 1.05, 1.1, 1.15, 1.55, 1.6), 1.2, 0.2, 0.35 - 0.05, 0.15),
    ((1.0, 1.05, 1.1, 1.15, 1.2, 1.6, 1.65), 1.16, 0.24, 0.0, 0.1),  # audio was on its way
    ((1.0, 1.01, 1.02, 1.03, 1.04, 1.3, 1.31), 1.05, 0.45, 0.25 - 0.01, 0.0),  # it was ahead of its listener
])  # fmt: skip
def test_how_a_stream_takes_an_interruption(
    arrivals_s: tuple[float, ...], moment_s: float, buffered_s: float, next_s: float, heard_s: float
) -> None:
    found = interruption(heard(*arrivals_s), moment_s)
    assert found is not None
    assert (found.buffered_s, found.next_s, found.heard_s) == pytest.approx((buffered_s, next_s, heard_s))


@pytest.mark.parametrize("moment_s", [0.9, 1.7])
def test_streams_that_had_not_begun_or_were_complete_are_left_out(moment_s: float) -> None:
    assert interruption(heard(1.0, 1.6), moment_s) is None


def test_what_stands_beside_a_talker_grows_with_their_number() -> None:
    options = several.parsed([*OPTIONS, "--cpu"])
    hybrid = several.application(options, 4, "hybrid")
    assert [pool.replicas for pool in (hybrid.talker_pool, hybrid.ingress_pool, hybrid.codec_pool)] == [4, 8, 32]
    inline = several.application(options, 4, "inline")
    assert (inline.codec.placement, inline.codec_pool.replicas, inline.num_gpus) == ("inline", 4, 0.0)


def test_a_layout_is_a_pool_of_so_many_cores() -> None:
    app = pool.application(pool.parsed(OPTIONS), "4x3", "pool")
    assert (app.codec.placement, app.codec.workers) == ("pool", 3)
    assert (app.codec_pool.replicas, app.codec_pool.num_cpus) == (4, 3.0)
    assert app.talker_pool.num_gpus == 1.0
    small = pool.application(pool.parsed([*OPTIONS, "--cpu"]), "1x2", "hybrid")
    assert (small.codec.placement, small.talker.device, small.talker_pool.num_gpus) == ("hybrid", "cpu", 0.0)
