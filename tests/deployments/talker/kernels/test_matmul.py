import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: make kernels installs it")

from deployments.talker.kernels.matmul import Activations, Product, like_rows, matmul, measure_squares, normalise
from deployments.talker.kernels.tiles import Form, Tile
from tools.kernels.reference import reference_matmul

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
WIDE, DEPTH = 64, 96
VECTOR, DOT = Tile(Form.VECTOR, 8, 32, 4), Tile(Form.PIPELINED, 16, 32, 4, 3)
SPLIT = Tile(Form.SPLIT, 16, 16, 2)
TALL = Tile(Form.PIPELINED, 16, 32, 4, 3, block_m=64)
CHAINS = Tile(Form.PIPELINED, 16, 32, 4, 3, chains=2)
COPIED = Tile(Form.COPIED, 16, 32, 4, 3, block_m=64)
CASES = [
    (1, VECTOR), (3, VECTOR), (1, DOT), (5, DOT), (20, DOT), (5, CHAINS), (5, TALL), (70, TALL), (70, DOT),
    (1, SPLIT), (5, SPLIT), (20, SPLIT), (5, COPIED), (70, COPIED),
]  # fmt: skip


def given(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Activations, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, DEPTH, generator=generator).to(device, dtype)
    weight = (torch.randn(2 * WIDE, DEPTH, generator=generator) / DEPTH**0.5).to(device, dtype)
    prepared = like_rows(rows, DEPTH, x)
    prepared.values.copy_(x)
    measure_squares(prepared)
    return prepared, weight


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2e-2


@pytest.mark.parametrize(("rows", "tile"), CASES)
@pytest.mark.parametrize("gated", [False, True])
def test_normalised_product(rows: int, tile: Tile, gated: bool, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = given(rows, dtype, device)
    product = Product(eps=1e-6, gated=gated)
    out = like_rows(rows, WIDE if gated else 2 * WIDE, weight)
    out.values.fill_(torch.nan)
    matmul(x, weight, out, product, tile=tile)
    expected = reference_matmul(x.values.double(), weight.double(), product)
    torch.testing.assert_close(out.values.double(), expected, atol=tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize(("rows", "tile"), CASES)
def test_residual_and_the_squares_it_leaves(rows: int, tile: Tile, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = given(rows, dtype, device)
    residual = torch.randn(rows, 2 * WIDE).to(device, dtype)
    out = like_rows(rows, 2 * WIDE, weight)
    matmul(x, weight, out, Product(), residual=residual, leave_squares=True, tile=tile)
    expected = reference_matmul(x.values.double(), weight.double(), Product(), residual=residual.double())
    torch.testing.assert_close(out.values.double(), expected, atol=tolerance(dtype), rtol=tolerance(dtype))
    squares = out.squares[: out.parts, :rows].sum(0)
    torch.testing.assert_close(squares, out.values.float().square().sum(1), atol=1e-3, rtol=1e-5)


def test_in_place_residual(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = given(4, dtype, device)
    stream = like_rows(4, 2 * WIDE, weight)
    stream.values.normal_()
    before = stream.values.clone()
    matmul(x, weight, stream, Product(), residual=stream.values, leave_squares=True, tile=DOT)
    expected = reference_matmul(x.values.double(), weight.double(), Product(), residual=before.double())
    torch.testing.assert_close(stream.values.double(), expected, atol=tolerance(dtype), rtol=tolerance(dtype))


def test_bias(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = given(2, dtype, device)
    bias = torch.randn(2 * WIDE).to(device, dtype)
    out = like_rows(2, 2 * WIDE, weight)
    matmul(x, weight, out, Product(), bias=bias, tile=DOT)
    expected = reference_matmul(x.values.double(), weight.double(), Product(), bias=bias.double())
    torch.testing.assert_close(out.values.double(), expected, atol=tolerance(dtype), rtol=tolerance(dtype))


def test_normalise(dtype: torch.dtype, device: torch.device) -> None:
    x, _ = given(3, dtype, device)
    weight = torch.rand(DEPTH).to(device, dtype)
    out = torch.full_like(x.values, torch.nan)
    normalise(x, weight, out, 1e-6)
    expected = torch.nn.functional.rms_norm(x.values.double(), (DEPTH,), weight.double(), 1e-6)
    torch.testing.assert_close(out.double(), expected, atol=tolerance(dtype), rtol=tolerance(dtype))
