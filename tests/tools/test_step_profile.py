import pytest

from talkray_tools.step_profile import Ran, shares_of


def test_shares_add_up_to_the_step() -> None:
    """A kernel that starts before its predecessor ends is charged from that end on."""
    step = [("_gather", 0, 1), ("pipelined_matmul", 1, 5), ("_sample_code", 3, 8), ("_feed", 8, 9), ("_settle", 9, 10)]
    ran = [Ran(name, start + 100 * run, end + 100 * run) for run in range(2) for name, start, end in step]
    shares = {(share.half, share.part): share for share in shares_of(ran, batch=3, runs=2)}
    assert set(shares) == {
        ("predictor", "products"),
        ("predictor", "sampling and embedding"),
        ("predictor", "state, copies and the rest"),
        ("talker", "state, copies and the rest"),
    }
    assert shares["predictor", "products"].launches == 1
    assert shares["predictor", "products"].ms == 0.004
    assert shares["predictor", "sampling and embedding"].ms == 0.003
    assert sum(share.ms for share in shares.values()) == pytest.approx((110 - 0) / 2 / 1000)
