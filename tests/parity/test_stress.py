"""What `make parity` says of stressed weights, with our own codes in the place of the official package's."""

import numpy as np
import pytest

from deployments.protocol import Codes
from talkray_tools.choices import Divergence
from talkray_tools.random_codec import Stress
from tests.parity.cases import DECODINGS, STRESS, Case, cases_of
from tests.parity.checkpoints import write_stressed
from tests.parity.ours import Ours
from tests.parity.run import NEAR_TIE, STRESSED, near_ties


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Ours:
    return Ours(write_stressed(tmp_path_factory.mktemp("stress") / "checkpoint", STRESSED, Stress.OUTLIERS, seed=1))


@pytest.fixture(scope="module")
def case() -> Case:
    return cases_of(STRESSED, STRESS)[0]


@pytest.fixture(scope="module", params=STRESS.decodings)
def decoding(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def spoken(ours: Ours, case: Case, decoding: str) -> Codes:
    return ours.codes(case, DECODINGS[decoding], None, extent=STRESS)


def found(ours: Ours, case: Case, decoding: str, expected: Codes) -> list[Divergence]:
    return ours.divergences(case, DECODINGS[decoding], expected, extent=STRESS)


def test_equal_codes_have_no_divergence(ours: Ours, case: Case, decoding: str, spoken: Codes) -> None:
    assert found(ours, case, decoding, spoken) == []
    assert near_ties("n", [], spoken).passed


def test_a_wrong_code_is_no_near_tie_and_those_behind_it_are_still_compared(
    ours: Ours, case: Case, decoding: str, spoken: Codes
) -> None:
    wrong = spoken[:4].copy()
    wrong[1, 3] = (wrong[1, 3] + 1000) % 2048
    first = found(ours, case, decoding, wrong)[0]
    assert (first.frame, first.codebook) == (1, 3)
    assert first.margin > NEAR_TIE
    assert not near_ties("n", [first], wrong).passed
    assert f"frame 1, codebook 3, by a margin of {first.margin:.1e}" in near_ties("n", [first], wrong).detail


def test_speech_that_ends_elsewhere_is_a_divergence(ours: Ours, case: Case, decoding: str, spoken: Codes) -> None:
    assert (len(spoken) // 2, 0) in [
        (each.frame, each.codebook) for each in found(ours, case, decoding, spoken[: len(spoken) // 2])
    ]


def test_many_near_ties_are_none() -> None:
    codes = np.zeros((10, 16), np.int16)
    assert near_ties("n", [Divergence(0, 0, 1e-5)] * 3, codes).passed
    assert not near_ties("n", [Divergence(0, 0, 1e-5)] * 4, codes).passed
