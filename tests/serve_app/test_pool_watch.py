import threading

import pytest

from deployments import ray_internals
from deployments.ray_internals import Pool
from serve_app import pool_watch
from serve_app.pool_watch import PoolWatch


class Controller:
    """What Serve says of two pools, and what the control store says of the actors in them."""

    def __init__(self, talkers: Pool, codecs: Pool, dead: set[str]) -> None:
        self.pools = {"talker": talkers, "codec": codecs}
        self.dead = dead

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> PoolWatch:
        """A watch after its first turn."""
        monkeypatch.setattr(PoolWatch, "_watch", lambda watch: None)
        monkeypatch.setattr(ray_internals, "is_alive", lambda actor: actor not in self.dead)
        watch = PoolWatch("talkray")
        watch._pools = self.pools
        watch._ask_who_lives()
        return watch


ONE, NONE, STARTING = Pool(1, ("a",)), Pool(0, ()), Pool(1, ())


@pytest.mark.parametrize(
    ("talkers", "codecs", "dead", "running", "ready"),
    [
        (ONE, Pool(1, ("b",)), set(), True, True),
        (Pool(2, ("a", "c")), Pool(1, ("b",)), {"c"}, True, True),
        (ONE, Pool(1, ("b",)), {"a"}, False, False),  # the controller has not noticed yet
        (STARTING, Pool(1, ("b",)), set(), False, False),
        (NONE, Pool(1, ("b",)), set(), False, True),  # the first request starts one
        (ONE, Pool(1, ("b",)), {"b"}, False, False),
        (ONE, NONE, set(), True, True),  # no stream passes a codec replica
    ],
)
def test_speech_needs_a_live_replica_of_each_pool(
    monkeypatch: pytest.MonkeyPatch, talkers: Pool, codecs: Pool, dead: set[str], running: bool, ready: bool
) -> None:
    watch = Controller(talkers, codecs, dead).watch(monkeypatch)
    assert (watch.is_running(), watch.is_ready()) == (running, ready)


def test_an_error_that_nobody_expected_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen last would stand for good: a talker that was dead then, for one."""
    answers = iter([KeyError("actor_id"), {"Talker": ONE}])
    seen = threading.Event()

    def pools(app_name: str) -> dict[str, Pool]:
        answer = next(answers, {})
        if isinstance(answer, Exception):
            raise answer
        seen.set()
        return answer

    monkeypatch.setattr(pool_watch, "_TURN_S", 0.01)
    monkeypatch.setattr(ray_internals, "pools", pools)
    monkeypatch.setattr(ray_internals, "is_alive", lambda actor: True)
    monkeypatch.setattr(PoolWatch, "_count_deaths", lambda watch: None)
    PoolWatch("talkray")
    assert seen.wait(30.0)
