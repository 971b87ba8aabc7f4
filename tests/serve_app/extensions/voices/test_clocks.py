import pytest

from serve_app.extensions.voices import clocks
from tests.clock import Clock


@pytest.mark.parametrize(("shortest_s", "settles_s"), [(30 * 86400.0, 600.0), (60.0, 60.0)])
def test_a_clock_is_trusted_once_steady(monkeypatch: pytest.MonkeyPatch, shortest_s: float, settles_s: float) -> None:
    own, wall = Clock(), Clock(1e9)
    monkeypatch.setattr(clocks.time, "monotonic", own)
    monkeypatch.setattr(clocks.time, "time", wall)
    steady = clocks.SteadyClock(shortest_s=shortest_s)

    def after(passed_s: float, *, jump_s: float = 0.0) -> float | None:
        own.now_s += passed_s
        wall.now_s += passed_s + jump_s
        return steady.now()

    assert [after(0.0), after(settles_s - 1), after(1.0)] == [None, None, wall.now_s]
    assert [after(1.0, jump_s=-8.0), after(settles_s - 1), after(1.0, jump_s=4.0)] == [None, None, wall.now_s]
