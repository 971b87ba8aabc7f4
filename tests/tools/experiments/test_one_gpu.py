from loadtest.arrivals import RequestKind
from tools.experiments.one_gpu import Costs, serve, table


def test_mixed_traffic_is_spoken_in_time() -> None:
    done = serve(40.0, seconds=3.0)
    assert len(done.heard) > 100
    assert not done.refused
    assert not any(each.is_stalled for each in done.heard)
    assert {each.kind for each in done.heard} == set(RequestKind)
    assert 10 < done.first_ms(50) < done.first_ms(95) < 30
    assert done.gpu.most_waiting == 0
    assert table({40.0: done}).rows[0][3] == f"0 of {len(done.heard)} "


def test_the_same_traffic_has_the_same_end() -> None:
    first, second = serve(10.0, seconds=1.0), serve(10.0, seconds=1.0)
    assert [each.first_s for each in first.heard] == [each.first_s for each in second.heard]


def test_a_gpu_that_is_too_slow_refuses_because_of_its_line() -> None:
    slow = Costs(step_s=(0.1, 0.2, 0.3, 0.4))
    done = serve(40.0, seconds=3.0, costs=slow, rows=16)
    assert done.refused["line"] > 10
    assert sum(each.refused is not None for each in done.heard) == sum(done.refused.values())
