"""Who is to blame for a lost stream, when there is speech again, and whether `/ready` was right."""

import time

from tools.experiments.faults.polite import Stream
from tools.experiments.faults.soak_report import (
    Probe,
    SoakKill,
    SoakRecords,
    back_s,
    blame,
    lies,
    spoken,
    unexpected_ends,
)
from tools.experiments.faults.supervised import ServerStart


def broken(ended_s: float) -> Stream:
    return Stream("polite", "HTTP", 0, began_s=0.0, ended_s=ended_s, outcome="broken")


def records(*probes: Probe, kills: tuple[SoakKill, ...] = ()) -> SoakRecords:
    return SoakRecords(0.0, len(kills), probes=[*probes], kills=[*kills])


def test_a_stream_is_lost_to_what_died_just_before() -> None:
    kills = [SoakKill("talker replica", 8.0, 1), SoakKill("ingress replica", 10.0, 1), SoakKill("GCS", 50.0, 1)]
    assert [blame(broken(at_s), kills) for at_s in (9.0, 10.2, 16.0, 52.0, 70.0)] == [
        "other", "ingress or proxy", "other", "server", "other",
    ]  # fmt: skip


def test_ready_is_wrong_where_nothing_is_spoken() -> None:
    assert len(lies(records(Probe(1.0, 1.1, 200, 503, 200)))) == 1
    assert len(lies(records(Probe(1.0, 1.1, 503, 200, 503)))) == 1
    waits = records(Probe(1.0, 20.0, 200, 200, 200))
    waits.ready = [(2.0, 200), (10.0, 200), (12.0, 503)]
    assert len(lies(waits)) == 1


def test_ready_is_right() -> None:
    assert lies(records(Probe(1.0, 1.1, 200, 200, 200), Probe(2.0, 2.1, 503, 503, 503))) == []
    assert lies(records(Probe(1.0, 1.1, 200, 429, 200))) == []
    assert lies(records(Probe(1.0, 1.1, 200, 503, 200), kills=(SoakKill("HAProxy", 1.05, 0),))) == []


def test_what_a_dying_server_still_speaks_is_no_return() -> None:
    seen = records(Probe(5.5, 6.0, 200, 200, 200), Probe(20.0, 21.0, 200, 200, 200))
    probes = spoken(seen)
    assert back_s(SoakKill("GCS", 5.0, 0), probes, [0.0, 9.0]) == 16.0
    assert back_s(SoakKill("talker replica", 5.0, 0), probes, [0.0]) == 1.0
    assert back_s(SoakKill("GCS", 30.0, 0), probes, [0.0, 35.0]) is None


def test_an_end_that_no_kill_explains() -> None:
    seen = records(kills=(SoakKill("raylet", 10.0, 0), SoakKill("HAProxy", 40.0, 0)))
    now_s = time.monotonic()
    seen.starts = [ServerStart(now_s, ended_s, 1, False, (), "lost") for ended_s in (11.0, 41.0)]
    assert unexpected_ends(seen) == ["at 41 s with 1: lost"]
