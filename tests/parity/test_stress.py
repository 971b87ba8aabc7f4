"""What `make parity` says of stressed weights, with our own codes in the place of the official package's."""

import numpy as np
import pytest

from deployments.protocol import Codes
from talkray_tools.choices import Divergence, near_ties
from talkray_tools.random_codec import Stress
from tools.experiments.parity.cases import DECODINGS, STRESS, ParityCase, cases_of
from tools.experiments.parity.ours import Ours, write_stressed
from tools.experiments.parity.run import NEAR_TIE, STRESSED


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Ours:
    return Ours(write_stressed(tmp_path_factory.mktemp("stress") / "checkpoint", STRESSED, Stress.OUTLIERS, seed=1))


@pytest.fixture(scope="module")
def case() -> ParityCase:
    return cases_of(STRESSED, STRESS)[0]


@pytest.fixture(scope="module", params=STRESS.decodings)
def decoding(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def spoken(ours: Ours, case: ParityCase, decoding: str) -> Codes:
    return ours.codes(case, DECODINGS[decoding], None, extent=STRESS)


def found(ours: Ours, case: ParityCase, decoding: str, expected: Codes) -> list[Divergence]:
    return ours.divergences(case, DECODINGS[decoding], expected, extent=STRESS)


def test_equal_codes_have_no_divergence(ours: Ours, case: ParityCase, decoding: str, spoken: Codes) -> None:
    assert found(ours, case, decoding, spoken) == []
    assert near_ties([], spoken, NEAR_TIE)[0]


def test_a_wrong_code_is_no_near_tie_and_hides_none(ours: Ours, case: ParityCase, decoding: str, spoken: Codes) -> None:
    wrong = spoken[:4].copy()
    wrong[1, 3] = (wrong[1, 3] + 1000) % 2048
    first = found(ours, case, decoding, wrong)[0]
    assert (first.frame, first.codebook) == (1, 3)
    passed, detail = near_ties([first], wrong, NEAR_TIE)
    assert not passed
    assert f"frame 1, codebook 3, with a margin of {first.margin:.1e}" in detail


def test_speech_that_ends_elsewhere_is_a_divergence(ours: Ours, case: ParityCase, decoding: str, spoken: Codes) -> None:
    assert (len(spoken) // 2, 0) in [
        (each.frame, each.codebook) for each in found(ours, case, decoding, spoken[: len(spoken) // 2])
    ]


@pytest.mark.parametrize(("found", "passed"), [
    ([], True), ([Divergence(3, 2, 1e-4, 1.0)], True), ([Divergence(3, 2, 4e-4, 4.0)], True),
    ([Divergence(3, 2, 4e-4, 1.0)], False), ([Divergence(3, 2, -1e-5, 1.0)], False),
    ([Divergence(3, 2, 1e-5, 1.0)] * 3, False),
])  # fmt: skip
def test_few_frames_may_differ_and_those_by_little(found: list[Divergence], passed: bool) -> None:
    verdict, detail = near_ties(found, np.zeros((20, 16), np.int16), NEAR_TIE)
    assert verdict is passed
    assert "frame 3, codebook 2" in detail or not found
