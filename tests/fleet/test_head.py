"""A head without Redis: what is there speaks on until another head comes, which knows nothing of it."""

from collections.abc import Iterator

import pytest

from tests.fleet.listeners import Listeners, different, undisturbed
from tools.experiments.fleet.fleet import CODECS, TALKERS, Fleet, fleet, scaled_down

AT_ONCE = 2


@pytest.fixture
def unguarded(possible: None) -> Iterator[Fleet]:
    with fleet() as made:
        made.start_head()
        for pool in (TALKERS, CODECS):
            made.add(pool, pool)
        made.deploy(scaled_down(made))
        yield made


def test_without_redis_a_new_head_ends_what_speaks(unguarded: Fleet) -> None:
    doors = unguarded.open_doors(unguarded.workers)
    expected = undisturbed(doors, unguarded.key)
    listeners = Listeners(doors, unguarded.key, at_once=AT_ONCE)
    with listeners.listening():
        listeners.wait_under_way(AT_ONCE)
        unguarded.kill_head()
        listeners.wait_heard(2 * AT_ONCE)
        assert different(listeners.heard, expected) == []
        before = len(listeners.heard)
        unguarded.start_head()
        ended_s = unguarded.wait(lambda: not any(each.is_running for each in unguarded.workers), "the end of the nodes")
    lost = [each for each in listeners.heard[before:] if each.error]
    print(f"the nodes ended {ended_s:.0f} s after another head was there: {len(lost)} streams and requests lost")
    assert lost
    with pytest.raises(RuntimeError, match="no Serve instance"):
        unguarded.ask("applications")
