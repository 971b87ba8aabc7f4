import pytest

from talkray_tools.step_profile import Ran, busy_of, shares_of


def test_shares_add_up_to_the_step() -> None:
    """A kernel that starts before its predecessor ends is charged from that end on."""
    step = [("_gather", 0, 1), ("pipelined_matmul", 1, 5), ("_sample_code", 3, 8), ("_feed", 8, 9), ("_settle", 9, 10)]
    ran = [Ran(name, start + 100 * run, end + 100 * run) for run in range(2) for name, start, end in step]
    shares = {(share.half, share.part): share for share in shares_of(ran, batch=3, runs=2)}
    assert set(shares) == {
        ("predictor", "products"), ("predictor", "sampling and embedding"),
        ("predictor", "state, copies and the rest"), ("talker", "state, copies and the rest"),
    }  # fmt: skip
    assert (shares["predictor", "products"].launches, shares["predictor", "products"].ms) == (1, 0.004)
    assert shares["predictor", "sampling and embedding"].ms == 0.003
    assert sum(share.ms for share in shares.values()) == pytest.approx((110 - 0) / 2 / 1000)


def test_a_second_of_the_device_under_load_is_split_by_what_ran() -> None:
    """Prompts stand between steps, the codec has a stream of its own, and time in which two run counts for both."""
    talker = [("_prompt", 0, 10), ("_gather", 10, 20), ("_feed", 20, 30), ("_settle", 25, 40), ("_prompt", 60, 70)]
    codec = [("conv_kernel", 30, 50), ("some copy", 50, 55)]
    ran = [Ran(*kernel, stream=7) for kernel in talker] + [Ran(*kernel, stream=9) for kernel in codec]
    ran.append(Ran("Memcpy DtoH", 90, 100, stream=7))
    ms = {busy.part: (busy.ms, busy.alone_ms) for busy in busy_of(ran, rate=80)}
    assert ms == {
        "nothing": (pytest.approx(250), pytest.approx(250)), "codec": (pytest.approx(250), pytest.approx(150)),
        "prompts": (pytest.approx(200), pytest.approx(200)), "talker": (pytest.approx(200), pytest.approx(100)),
        "predictor": (pytest.approx(100), pytest.approx(100)),
        "copies": (pytest.approx(100), pytest.approx(100)),
    }  # fmt: skip


def test_work_of_the_lane_does_not_change_what_a_step_does() -> None:
    step = [("_gather", 0, 10), ("matmul", 10, 60), ("_feed", 60, 70), ("matmul", 70, 100)]
    lane = [("_prompt", 5, 25), ("_gather", 25, 35), ("matmul", 35, 55)]
    ran = [Ran(*kernel, stream=7) for kernel in step] + [Ran(*kernel, stream=11) for kernel in lane]
    ms = {busy.part: busy.ms for busy in busy_of(ran, rate=80) if busy.ms}
    assert ms == {"predictor": pytest.approx(600), "prompts": pytest.approx(200), "talker": pytest.approx(400)}
