from contextlib import ExitStack

import pytest

from deployments.codec.service import Placement
from deployments.config import CodecConfig
from deployments.protocol import ALL_FRAMES

FRAME_S = 0.08


def placement_of(name: str, *, on_gpu: bool = True, workers: int = 1) -> Placement:
    placement = Placement(CodecConfig(placement=name, workers=workers), frame_s=FRAME_S)  # type: ignore[arg-type]
    placement.talker_on_gpu = on_gpu
    return placement


@pytest.mark.parametrize(
    ("name", "on_gpu", "expected"),
    [
        ("pool", True, 0),
        ("hybrid", False, 0),
        ("hybrid", True, 12),
        ("inline", True, ALL_FRAMES),
        ("inline", False, ALL_FRAMES),
    ],
)
def test_an_idle_pool_asks_for_its_placement(name: str, on_gpu: bool, expected: int) -> None:
    with placement_of(name, on_gpu=on_gpu).admit(0.0) as frames:
        assert frames == expected


def test_the_busier_the_pool_the_more_the_gpu_does() -> None:
    placement = placement_of("hybrid", workers=2)
    with ExitStack() as streams:
        asked = [streams.enter_context(placement.admit(0.2 * FRAME_S)) for _ in range(12)]
    assert asked == sorted(asked)
    assert asked[0] < 20
    assert asked[-1] == ALL_FRAMES
    assert sum(frames < ALL_FRAMES for frames in asked) == 8  # 9 of 10 fifths of a core would be one too many
    with placement.admit(0.2 * FRAME_S) as frames:
        assert frames == asked[0]  # all have left
