import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: make kernels installs it")

from tools.kernels.sweep import Case, Chain, candidates, cases_of, config_of

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def test_every_candidate_divides_its_product() -> None:
    for case in cases_of(config_of("1.7B-CustomVoice")):
        for rows in case.all_rows:
            tiles = list(candidates(case, rows))
            assert tiles
            for tile in tiles:
                depth = case.depth // tile.warps if tile.form == "split" else case.depth
                assert case.columns % tile.block_n == 0
                assert depth % tile.block_k == 0


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(("gated", "residual"), [(False, False), (True, False), (False, True)])
def test_candidates_compute_the_product(rows: int, gated: bool, residual: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    case = Case("small", 64, 2048, gated, residual)
    chain = Chain(case, rows, device=device)
    forms = {tile.form: tile for tile in candidates(case, rows)}
    assert forms
    assert all(chain.is_right(tile) for tile in forms.values())
