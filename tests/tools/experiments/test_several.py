from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.arrivals import Phase, place
from loadtest.measure import Result
from loadtest.metrics import Limits
from loadtest.traces import Failure, PcmLayout, Trace
from tools.experiments.gpu.several import Bench, Row, application, main, must, parsed, table

OPTIONS = ["--model", "embedded", "--out", "results", "--cpu"]
CHUNKS = [(0.1, 48_000), (0.2, 96_000)]  # two seconds, in time
HEARD = Trace(0, 0.0, 0.001, frames=25, chunks=CHUNKS, first_byte_s=0.1, finished_s=0.2, num_bytes=96_000)


def spoken(**changes: object) -> Trace:
    trace = replace(HEARD, layout=PcmLayout(24_000), audible_sample=0, status=200)
    return replace(trace, **changes)


def row(*traces: Trace, talkers: int = 1, **changes: object) -> Row:
    result = Result("run", {}, place([Phase("measured", 1.0, 9.0)]), Limits(), list(traces), [], len(traces))
    return replace(Row("inline", talkers, 81.0, result), **changes)


def test_a_row_that_holds_says_so() -> None:
    one, two = row(spoken()), row(spoken(), talkers=2)
    assert two.problems(one) == []
    assert "| inline | 2 | load | 81 | 1 |" in table([one, two])
    assert table([one, two]).count("holds") == 2


def test_audio_that_comes_late_is_missed() -> None:
    stalled = spoken(chunks=[(0.1, 48_000), (3.0, 96_000)], finished_s=3.0)
    assert row(spoken(), stalled, talkers=8).problems(None) == ["50.0% in time, not 92%"]


def test_first_audio_may_take_a_third_longer_than_with_one_talker() -> None:
    slow = spoken(chunks=[(0.15, 48_000), (0.2, 96_000)], first_byte_s=0.15)
    assert row(slow, talkers=2).problems(row(spoken())) == ["TTFA p95 1.50 times that of one"]


def test_a_late_client_is_no_result() -> None:
    assert row(spoken(sent_s=0.02)).problems(None) == ["the client was 20.0 ms late: more --processes"]


def test_under_a_fault_only_what_is_lost_counts() -> None:
    refused = spoken(failure=Failure.REFUSED, chunks=[], first_byte_s=None)
    assert row(spoken(), refused, what="talker killed").problems(None) == []
    assert row(spoken(), what="talker killed", lost=1).problems(None) == ["1 not whole"]


@pytest.mark.parametrize(("talkers", "share"), [(1, 0.98), (2, 0.98), (3, 0.95), (4, 0.95), (8, 0.92), (16, 0.92)])
def test_the_more_talkers_the_less_has_to_be_in_time(talkers: int, share: float) -> None:
    assert must(talkers) == share


def test_what_stands_beside_a_talker_grows_with_their_number() -> None:
    options = parsed(OPTIONS)
    options.config = Path(__file__).parents[3] / options.config
    hybrid = application(options, talkers=4, placement="hybrid")
    assert [pool.replicas for pool in (hybrid.talker_pool, hybrid.ingress_pool, hybrid.codec_pool)] == [4, 8, 32]
    inline = application(options, talkers=4, placement="inline")
    assert (inline.codec.placement, inline.codec_pool.replicas, inline.num_gpus) == ("inline", 4, 0.0)


class Carrying(Bench):
    """A talker that carries so much and no more."""

    def __init__(self, limit: float) -> None:
        self.options = parsed([*OPTIONS, "--start", "80"])
        self.placement, self.talkers, self.limit = "inline", 1, limit

    def load(self, rate: float, duration_s: float, **_: object) -> tuple[Row, None]:
        late = spoken(chunks=[(0.1, 48_000), (3.0, 96_000)])
        return row(spoken() if rate < self.limit else late), None


def test_what_one_carries_is_the_last_rate_in_time() -> None:
    assert Carrying(100.0).one_carries() == pytest.approx(96.8)


def test_a_first_rate_that_is_too_high_is_said() -> None:
    with pytest.raises(SystemExit, match="give a lower --start"):
        Carrying(70.0).one_carries()


def test_without_a_rate_the_first_is_one_talker(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*OPTIONS, "--talkers", "2,4"])
    assert "without --one" in capsys.readouterr().err
