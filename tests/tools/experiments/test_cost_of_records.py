import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.api.records.record_keeper import RecordSink
from serve_app.config import RecordSettings
from tools.experiments.cost_of_records import Switch, SwitchedKeeper, SwitchedRecords, check_kept, verdict


class Sink(RecordSink):
    def __init__(self) -> None:
        self.taken: list[Any] = []

    def receive(self, record: Any) -> None:
        self.taken.append(record)

    def flush(self, *, is_last: bool) -> None:
        """Keeps nothing back."""


@pytest.fixture
def switch(tmp_path: Path) -> Switch:
    (tmp_path / "switch").write_bytes(bytes(Switch.NUM_BYTES))
    return Switch(tmp_path / "switch")


def blocks(*, cost_ms: float, null_ms: float = 0.0, noise_ms: float = 0.3) -> list[dict[str, float]]:
    """Turns of a server whose speed changes from block to block."""
    draw, found = random.Random(3), []
    for _ in range(300):
        quiet_ms = 15 + draw.expovariate(0.5)
        turns = {"all": cost_ms, "none": 0.0, "null": null_ms}
        found.append({name: quiet_ms + more + draw.gauss(0, noise_ms) for name, more in turns.items()})
    return found


@pytest.mark.parametrize(
    ("cost_ms", "null_ms", "noise_ms", "proven"),
    [(0.05, 0, 0.3, True), (0.3, 0, 0.3, False), (0.05, 0, 5, False), (0.05, 1, 0.3, False)],
)
def test_a_cost_is_proven_beside_a_null_run(cost_ms: float, null_ms: float, noise_ms: float, proven: bool) -> None:
    lines, is_proven = verdict(blocks(cost_ms=cost_ms, null_ms=null_ms, noise_ms=noise_ms))
    assert is_proven is proven, lines
    assert lines[-1].startswith("proven" if proven else "NOT proven")
    assert any(line.startswith("not comparable") for line in lines) is bool(null_ms)


def test_all_processes_see_the_switch(switch: Switch, tmp_path: Path) -> None:
    other = Switch(tmp_path / "switch")
    records = SwitchedRecords(other, RecordSettings())
    assert (other.is_on, records.stages) == (False, False)
    switch.turn(on=True)
    assert (other.is_on, records.stages) == (True, True)


def test_records_are_kept_while_the_switch_is_on(switch: Switch) -> None:
    sink = Sink()
    keeper = SwitchedKeeper(switch, [sink])
    kept, dropped = (SimpleNamespace(usage=SimpleNamespace(marks=()), name=name) for name in ("kept", "dropped"))
    switch.turn(on=True)
    keeper.keep(kept)  # type: ignore[arg-type]
    switch.turn(on=False)
    keeper.keep(dropped)  # type: ignore[arg-type]
    keeper.close()
    assert sink.taken == [kept]
    assert (switch.num_kept, switch.thread) == (1, keeper._thread.native_id)


def test_a_switch_that_the_ingress_does_not_follow_proves_nothing() -> None:
    check_kept(18, 18)
    with pytest.raises(SystemExit, match="kept 0 records of 18 requests"):
        check_kept(0, 18)
