"""Which limits did not hold, by what was seen of listeners, probes and processes."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.test_attacks import WAYS, Seen, growth, judge, longest_s
from tools.experiments.faults.intruders import ATTACKS, Attack
from tools.experiments.faults.polite import Stream

ATTACK = next(attack for attack in ATTACKS if attack.name == "sends no JSON")
QUIET = Seen("quiet", pauses_s=dict.fromkeys(WAYS, 0.15), health_s=0.02)
GOOD = Seen("good", pauses_s=dict.fromkeys(WAYS, 0.24), health_s=0.19, peak_mib=40.0, got=Counter({"400": 9}))


def missed(attack: Attack = ATTACK, *, cores: int = 8, **changes: Any) -> list[str]:
    seen = replace(GOOD, missed=list[str](), **changes)
    judge(seen, QUIET, attack, cores=cores)
    return seen.missed


def test_all_limits_hold() -> None:
    assert missed() == []
    assert missed(got=Counter({"400": 9, "cut off": 2})) == []


@pytest.mark.parametrize(("changes", "said"), [
    ({"pauses_s": dict.fromkeys(WAYS, 0.15) | {"Realtime": 0.26}}, "Realtime waits 260 ms"),
    ({"health_s": 0.21}, "/health takes 210 ms"), ({"peak_mib": 600.0}, "600 MiB more"),
    ({"got": Counter({"500": 1, "400": 9})}, "1 times 500"),
    ({"got": Counter({"200": 2})}, "2 times 200, not 400"),
    ({"got": Counter({"broken: so": 3})}, "3 times broken: so"),
])  # fmt: skip
def test_a_limit_that_does_not_hold_is_told(changes: dict[str, Any], said: str) -> None:
    assert any(said in each for each in missed(**changes))


def test_listeners_may_wait_where_every_place_is_taken_and_on_few_cores() -> None:
    pauses_s = dict.fromkeys(WAYS, 9.0)
    assert missed(pauses_s=pauses_s) != []
    assert missed(pauses_s=pauses_s, health_s=9.0, peak_mib=600.0, cores=7) == ["a process takes 600 MiB more"]
    assert missed(replace(ATTACK, takes_every_place=True), pauses_s=pauses_s) == []


def test_a_wait_is_for_the_first_audio_or_between_two() -> None:
    stream = Stream("HTTP", began_s=10.0, first_s=10.2, ended_s=12.0, gap_s=0.1)
    assert longest_s(stream) == pytest.approx(0.2)
    assert longest_s(replace(stream, gap_s=0.5)) == 0.5
    assert longest_s(replace(stream, first_s=None)) == 2.0


def test_memory_may_grow_by_a_twentieth_or_a_little() -> None:
    kinds = {1: "ingress replica", 2: "HAProxy"}
    rows = growth({1: 100.0, 2: 10.0}, {1: 105.5, 2: 11.5}, kinds)
    assert [(row[0], row[-1]) for row in rows] == [("HAProxy", ""), ("ingress replica", "GROWN")]
