"""The codec's kernels for CPUs against the same in float64, and a decoder with them against one without."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu, layer_norm, silu

from deployments.codec.backends import c_kernels, products, torch_backend
from deployments.codec.backends.registry import load_decoder
from deployments.codec.backends.torch_backend import TorchBackend
from deployments.codec.decoder import MIN_SNR_DB, CodecDecoder, snr_db
from deployments.codec.fold import Conv, ConvNeXt, Linear, Snake
from deployments.weights.store import locate
from tests.deployments.codec.backends.test_backends import weights

ROUNDING = 2.0**-8  # to the nearest bfloat16, relative


@pytest.fixture(params=range(c_kernels.MATRIX_UNITS + 1))
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels do without some of the CPU's units."""
    monkeypatch.setattr(c_kernels, "MATRIX_UNITS", request.param)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_they_are_built_where_a_compiler_is_there() -> None:
    assert c_kernels.BUILT or shutil.which("cc") is None


def test_what_was_built_for_another_version_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_kernels, "_INTERFACE", 0)
    assert c_kernels._built() == {}


TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("target", TYPES)
@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("channels", [1, 7, 96])
def test_gathering_rows(source: torch.dtype, target: torch.dtype, channels: int) -> None:
    """Of several streams, behind their pasts, through a snake or none, for small values and for large ones."""
    x = (random(2, 5, channels) * torch.tensor([0.1, 30.0])[:, None, None]).to(source)
    pasts = [random(3, channels, seed=seed).to(target) for seed in (4, 5)]
    amplitude, frequency = random(channels, seed=1), random(channels, seed=2).abs() * 4
    rows, nexts = torch.full((2, 8, channels), 7.0, dtype=target), [torch.empty_like(past) for past in pasts]
    for snake in (Snake(amplitude, frequency), Snake(amplitude, None), None):
        assert c_kernels.gather(x, rows, snake, pasts, nexts)
        exact = x.double()
        if snake is not None:
            turned = x.float() if snake.frequency is None else x.float() * snake.frequency
            exact = exact + amplitude.double() * turned.double().sin().square()
        error = (rows[:, 3:].double() - exact).abs()
        assert (error <= 1e-5 + (ROUNDING if target == torch.bfloat16 else 0.0) * exact.abs()).all()
        assert all(torch.equal(own[:3], past) for own, past in zip(rows, pasts, strict=True))
        assert all(torch.equal(own[-3:], following) for own, following in zip(rows, nexts, strict=True))


def test_a_past_that_is_longer_than_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # with the C kernels, and without
        past, rows = random(54, 4), torch.empty(1, 57, 4)
        products.gather(random(1, 3, 4, seed=1), rows, None, [past], [past])
        assert torch.equal(past, rows[0, 3:])
        monkeypatch.setattr(c_kernels, "gather", lambda *_: False)


def test_what_is_not_finite_stays_so() -> None:
    x = torch.tensor([[[torch.nan, torch.inf, -torch.inf, 1.0]]])
    for target in TYPES:
        for snake in (Snake(torch.ones(4), None), None):
            out = torch.empty(1, 1, 4, dtype=target)
            assert c_kernels.gather(x, out, snake)
            assert torch.isfinite(out).tolist() == [[[False, False, False, True]]]


def test_rows_with_gaps_are_left_to_torch() -> None:
    x = random(1, 4, 8)[:, :, ::2]
    assert not c_kernels.gather(x, torch.empty(1, 4, 4), Snake(torch.ones(4), None))
    assert c_kernels.convolve_to_one(x, torch.ones(2, 4), torch.ones(1)) is None


@pytest.mark.parametrize(("taps", "channels"), [(7, 96), (1, 16), (3, 48)])
def test_a_convolution_to_one_channel(taps: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight, bias = random(2, 20 + taps, channels), random(taps, channels, seed=1), random(1, seed=2)
    got = c_kernels.convolve_to_one(rows, weight, bias)
    assert got is not None
    monkeypatch.setattr(products, "convolve_to_one", lambda *_, **__: None)
    without = products.ProductToOneChannel(Conv(weight[:, :, None], bias, 1, 1))(rows, new=torch.empty)
    for each in (got, without):
        assert ((each.double() - exactly(rows, weight[:, :, None], bias, 1)).abs() <= 1e-4).all()


@pytest.mark.parametrize(("frames", "known"), [(1, 0), (1, 3), (1, 40), (5, 2), (12, 40), (30, 7)])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "dtype"), [(2, 2, 64, TYPES[0]), (4, 2, 32, TYPES[1])])
def test_attention(frames: int, known: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    window, rounding = 16, ROUNDING if dtype == torch.bfloat16 else 0.0
    qkv, history = random(frames, (heads + 2 * kv_heads) * size), random(2, kv_heads, window - 1, size, seed=1)
    angles = random(frames, size // 2, seed=2).double().repeat(1, 2)
    q, k, v = qkv.double().view(frames, -1, size).transpose(0, 1).split([heads, kv_heads, kv_heads])
    q, k = (
        x * angles.cos() + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1) * angles.sin() for x in (q, k)
    )
    keys, values = torch.cat((history.double(), torch.stack((k, v))), dim=2).repeat_interleave(heads // kv_heads, dim=1)
    key, query = torch.arange(window - 1 + frames), torch.arange(frames)[:, None]
    mask = (key >= query) & (key < query + window) & (key >= window - 1 - known)
    scores = (q @ keys.transpose(1, 2) / size**0.5).masked_fill(~mask, -torch.inf)
    exact = (scores.softmax(dim=-1) @ values).transpose(0, 1).flatten(1)

    tables, before = [angles.cos().float(), angles.sin().float()], history.clone()
    got, following = torch.empty(frames, heads * size, dtype=dtype), torch.empty_like(history)
    c_kernels.attend(qkv.clone(), tables, (history, following), torch.tensor(known), got)
    assert ((got.double() - exact).abs() <= rounding * exact.abs() + 1e-5).all()
    wanted = torch.cat((history.double(), torch.stack((k, v))), dim=2)[:, :, -(window - 1) :]
    assert ((following.double() - wanted).abs() <= 1e-5).all()
    assert torch.equal(history, before), "states are never written in place"
    qkv[-1, 0] = torch.nan
    c_kernels.attend(qkv, tables, (history, following), torch.tensor(known), got)
    assert not got.isfinite().all()


def test_which_attention_is_ours() -> None:
    assert c_kernels.attends(64, 72)
    assert not c_kernels.attends(64, 257)
    assert not c_kernels.attends(8, 72)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("time", [1, 4, 30])
def test_a_depthwise_convolution_and_its_norm(time: int, dtype: torch.dtype) -> None:
    x, past, taps, bias = random(time, 96) + 3, random(6, 96, seed=1), random(7, 96, seed=2), random(96, seed=3)
    nothing, eps = Linear(torch.empty(0, 0), None), torch.tensor(1e-6)
    got, following = torch.empty(time, 96, dtype=dtype), torch.empty_like(past)
    c_kernels.depthwise_norm(x, (past, following), ConvNeXt(taps, bias, nothing, nothing), eps, got)
    rows = torch.cat((past, x)).double()
    exact = bias + sum(rows[tap : tap + time] * taps[tap] for tap in range(7))
    exact = layer_norm(exact, (96,), eps=1e-6)
    rounding = ROUNDING if dtype == torch.bfloat16 else 0.0
    assert ((got.double() - exact).abs() <= rounding * exact.abs() + 1e-4).all()
    assert torch.equal(following, rows[time:].float())
    x[-1, 5] = torch.inf
    c_kernels.depthwise_norm(x, (past, following), ConvNeXt(taps, bias, nothing, nothing), eps, got)
    assert not got[-1].isfinite().any()


def exactly(rows: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
    """A convolution in float64."""
    kernel = weight.double().permute(2, 1, 0)
    return conv1d(rows.double().transpose(1, 2), kernel, bias.double(), dilation=dilation).transpose(1, 2)


SHAPES = [  # taps, dilation, inputs, outputs, time
    (1, 1, 32, 32, 32), (7, 1, 32, 64, 33), (7, 9, 96, 96, 100), (2, 1, 64, 96, 63), (3, 3, 160, 32, 64),
    (1, 1, 96, 32, 1), (1, 1, 64, 64, 7), (7, 1, 32, 64, 4), (2, 3, 32, 32, 15), (7, 9, 64, 32, 16),
    (7, 3, 32, 32, 48),
]  # fmt: skip


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("kind", [c_kernels.Convolution, c_kernels.ExactConvolution])
@pytest.mark.parametrize(("taps", "dilation", "inputs", "outputs", "time"), SHAPES)
def test_a_convolution(
    taps: int, dilation: int, inputs: int, outputs: int, time: int, kind: type[c_kernels.Convolution]
) -> None:
    """And what is done with its results at once."""
    weight, bias = random(taps, inputs, outputs) / (taps * inputs) ** 0.5, random(outputs, seed=1)
    rows = random(3, (taps - 1) * dilation + time, inputs, seed=2).to(kind.dtype)
    convolution = kind(weight, bias, dilation)
    exact = exactly(rows, weight.to(kind.dtype), bias, dilation)
    got, snake = convolution(rows), Snake(random(outputs, seed=3), None)
    assert got.shape == exact.shape
    snaked = exact + snake.amplitude.double() * exact.sin().square()
    rounding = ROUNDING if kind.dtype == torch.bfloat16 else 0.0
    for rounded, wanted in (
        (got, exact), (convolution(rows, snake=snake), snaked), (convolution(rows, gelu=True), gelu(exact)),
    ):  # fmt: skip
        assert rounded.dtype == kind.dtype
        assert ((rounded.double() - wanted).abs() <= rounding * wanted.abs() + 1e-5).all()

    total = random(3, time, outputs, seed=4)
    behind = exact + total.double()
    assert convolution(rows, total=total) is total
    assert ((total.double() - behind).abs() <= 1e-5).all()
    assert ((convolution(rows, wide=True).double() - exact).abs() <= 1e-5).all()


@pytest.mark.parametrize("dilation", [1, 3, 9])
@pytest.mark.parametrize("time", [1, 4, 35, 36, 200, 500])
def test_minimal_filtering(time: int, dilation: int) -> None:
    """Of rows that fill no whole tile, one, several, or several passes."""
    weight, bias, snake = random(7, 32, 64) / 224**0.5, random(64, seed=1), Snake(random(64, seed=3), None)
    rows = random(2, 6 * dilation + time, 32, seed=2)
    convolution, exact = c_kernels.FilteredConvolution(weight, bias, dilation), exactly(rows, weight, bias, dilation)
    for got, wanted in (
        (convolution(rows), exact),
        (convolution(rows, snake=snake), exact + snake.amplitude.double() * exact.sin().square()),
    ):
        assert got.shape == wanted.shape
        assert ((got.double() - wanted).abs() <= 2e-4).all()


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("time", [1, 5, 40])
def test_a_gated_product(time: int) -> None:
    weight, bias, rows = random(1, 64, 96) / 8, random(96, seed=1), 4 * random(2, time, 64, seed=2)
    for kind, rounding in ((c_kernels.Convolution, ROUNDING), (c_kernels.ExactConvolution, 1e-6)):
        gates, ups = exactly(rows.to(kind.dtype), weight.to(kind.dtype), bias, 1).chunk(2, dim=2)
        got, exact = kind(weight, bias, gated=True)(rows.to(kind.dtype)), silu(gates) * ups
        assert got.shape == exact.shape
        assert ((got.double() - exact).abs() <= rounding * exact.abs() + 1e-5).all()


def test_a_row_depends_on_no_other() -> None:
    """However many rows a call has, of how many streams: sums have one order."""
    weight, bias, rows = random(7, 32, 32), random(32, seed=1), random(2, 106, 32, seed=2).bfloat16()
    convolution = c_kernels.Convolution(weight, bias, 1)
    for time in (1, 7, 16, 40):
        assert torch.equal(convolution(rows)[1:, 40 : 40 + time], convolution(rows[1:, 40 : 46 + time]))


def test_products_of_what_is_not_finite_are_not_finite() -> None:
    for bad in (torch.nan, torch.inf):
        rows = torch.zeros(1, 3, 32)
        rows[0, 1, 5] = bad
        weights = torch.ones(1, 32, 32)
        product, exact = c_kernels.Convolution(weights, None), c_kernels.ExactConvolution(weights, None)
        gated = c_kernels.Convolution(weights, None, gated=True)
        halves = rows.bfloat16()
        for result in (
            product(halves), product(halves, wide=True), product(halves, gelu=True), gated(halves), exact(rows),
        ):  # fmt: skip
            assert result.isfinite().all(dim=2).tolist() == [[True, False, True]]


@pytest.mark.parametrize("target", TYPES)
def test_rows_over_their_root_mean_square(target: torch.dtype) -> None:
    x, eps = random(2, 3, 96) * torch.tensor([1e-4, 1.0, 300.0])[:, None], torch.tensor(1e-5)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    got, rounding = c_kernels.normed(x, eps, target), ROUNDING if target == torch.bfloat16 else 0.0
    assert got.dtype == target
    assert ((got.double() - exact).abs() <= rounding * exact.abs() + 1e-6).all()
    x[1, 2, 3] = torch.nan
    assert c_kernels.normed(x, eps, target).isfinite().all(dim=2).tolist() == [[True] * 3, [True, True, False]]


def test_sums_of_the_entries_of_codes() -> None:
    tables, offsets = random(3 * 10, 40), torch.arange(3) * 10
    codes = torch.randint(10, (2, 5, 3), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(
        c_kernels.embed(codes, offsets, tables).double(), tables.double()[codes + offsets].sum(dim=2), atol=1e-5
    )


@pytest.fixture
def own_decoder() -> CodecDecoder:
    """A decoder whose layers are all computed by the kernels."""
    if not (c_kernels.MATRIX_UNITS or c_kernels.MULTIPLIES_FLOATS):
        pytest.skip("needs a CPU that multiplies bfloat16, or one with AVX2 only")
    return CodecDecoder(TorchBackend(weights(whole_blocks=True), "bfloat16" if c_kernels.MATRIX_UNITS else "float32"))


def test_captured_calls_make_what_calls_one_by_one_make(
    own_decoder: CodecDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of streams at other positions than those that they were captured with, before and after buffers have grown."""
    decoder, shapes = own_decoder, ((1, 1), (3, 2), (2, 12), (1, 1), (3, 2))

    def decoded() -> list[Tensor]:
        generator, states, parts = torch.Generator().manual_seed(0), [decoder.initial_state()] * 3, []
        for streams, frames in shapes * 2:
            size = (streams, frames, decoder.config.num_quantizers)
            codes = torch.randint(decoder.config.codebook_size, size, generator=generator)
            before = [[tensor.clone() for tensor in state.tensors] for state in states]
            audio, after = decoder.decode(codes, states[:streams])
            for state, tensors in zip(states, before, strict=True):
                assert all(map(torch.equal, state.tensors, tensors)), "states are never written in place"
            states[:streams] = after
            parts += [audio, *after[0].tensors]
        return parts

    captured = decoded()
    monkeypatch.setattr(torch_backend, "_CAPTURED_FRAMES", 0)
    assert all(map(torch.equal, captured, decoded()))


def test_threads_have_recordings_of_their_own(own_decoder: CodecDecoder) -> None:
    decoder, count = own_decoder, 4
    codes = torch.randint(32, (count, 3, 4), generator=torch.Generator().manual_seed(0))
    states = [decoder.initial_state()]

    def decoded(row: int) -> Tensor:
        return torch.cat([decoder.decode(codes[row : row + 1], states)[0] for _ in range(20)])

    with ThreadPoolExecutor(count) as pool:
        assert all(map(torch.equal, pool.map(decoded, range(count)), map(decoded, range(count))))


def test_what_fits() -> None:
    weight = torch.zeros(7, 2 * c_kernels.SIDE, c_kernels.SIDE)
    for dtype, has_units in ((TYPES[1], c_kernels.MATRIX_UNITS > 0), (TYPES[0], c_kernels.MULTIPLIES_FLOATS)):
        assert c_kernels.fits(weight, dtype) == has_units
        assert not c_kernels.fits(weight[:, : c_kernels.SIDE + 1], dtype)
        assert not c_kernels.fits(weight[:, :, :5], dtype)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_decoder_with_them_sounds_as_one_without(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no further from float32 than it, which is 40 dB for bfloat16 in the embedded voice."""
    directory = locate("embedded") / "speech_tokenizer"

    def decoded(kind: str) -> Tensor:
        decoder = load_decoder(directory, precision=kind)
        size = (1, 8, decoder.config.num_quantizers)
        codes = torch.randint(decoder.config.codebook_size, size, generator=torch.Generator().manual_seed(0))
        return decoder.decode(codes, [decoder.initial_state()])[0]

    own = decoded(precision)
    monkeypatch.setattr(c_kernels, "_functions", {})
    monkeypatch.setattr(products, "fits", lambda *_: False)
    exact, plain = decoded("float32"), decoded(precision)
    most = 95.0 if c_kernels.MULTIPLIES_FLOATS else 100.0  # minimal filtering adds rounding errors
    assert snr_db(exact, own) > max(MIN_SNR_DB, min(most, snr_db(exact, plain) - 1.0))
