"""A stream that comes to NaN or infinity is decoded again in float32; neither it nor the others are heard to suffer."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deployments.codec.backends.registry import load_decoder
from deployments.codec.backends.torch_backend import TorchBackend
from deployments.codec.batch import DecodeTask, decode_batch
from deployments.codec.decoder import MIN_SNR_DB, CodecDecoder, snr_db
from deployments.codec.decoder_state import DecoderState
from deployments.errors import EngineError

SIZES = (1, 4, 8, 12, 15)
BAD_CALL, BAD_ROW = 2, 1


class Overflowing:
    """A product that overflows for one stream in one call."""

    def __init__(self, product: Callable[[Tensor], Tensor], value: float, *, calls: set[int]) -> None:
        self._product, self._value, self._calls, self.dtype = product, value, calls, product.dtype  # type: ignore[attr-defined]
        self._call = -1

    def __call__(self, rows: Tensor) -> Tensor:
        self._call += 1
        out = self._product(rows)
        if self._call in self._calls:
            out[min(BAD_ROW, len(out) - 1), 0, 0] = self._value
        return out


def spoil(decoder: CodecDecoder, value: float, *, calls: set[int]) -> None:
    assert isinstance(decoder.backend, TorchBackend)
    products, layer = decoder.backend.products, decoder.backend.folded.layers[0].qkv
    products[layer] = Overflowing(products[layer], value, calls=calls)  # type: ignore[assignment,arg-type]


def chunks(decoder: CodecDecoder, codes: Tensor) -> Tensor:
    states, parts = [decoder.initial_state()] * len(codes), []
    for part in torch.split(codes, SIZES, dim=1):
        audio, states = decoder.decode(part, states)
        parts.append(audio)
    return torch.cat(parts, dim=1)


@pytest.fixture
def rounded(directory: Path) -> CodecDecoder:
    return load_decoder(directory, precision="bfloat16")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_only_the_stream_is_redone(value: float, rounded: CodecDecoder, decoder: CodecDecoder, codes: Tensor) -> None:
    undisturbed = chunks(rounded, codes)
    spoil(rounded, value, calls={BAD_CALL})
    heard = chunks(rounded, codes)
    others = [0, 2]
    assert torch.equal(heard[others], undisturbed[others])
    exact = chunks(decoder, codes)[BAD_ROW]
    ratio_db = snr_db(exact, undisturbed[BAD_ROW])
    assert snr_db(exact, heard[BAD_ROW]) > ratio_db - 1.0
    begin, end = (sum(SIZES[:call]) * decoder.frame_samples for call in (BAD_CALL, BAD_CALL + 1))
    assert snr_db(exact[begin:end], heard[BAD_ROW, begin:end]) > ratio_db
    assert rounded.repaired == 1


def test_overflow_of_a_recall_is_not_remembered(rounded: CodecDecoder, decoder: CodecDecoder, codes: Tensor) -> None:
    spoil(rounded, float("nan"), calls={0})
    for followed_by in (0, 100):
        (state,) = rounded.recall(codes[:1, :9], [rounded.initial_state()], followed_by=followed_by)
        assert all(tensor.isfinite().all() for tensor in state.tensors)
    assert rounded.repaired == 1


def test_float32_that_is_not_finite_ends_its_stream_only(directory: Path, decoder: CodecDecoder, codes: Tensor) -> None:
    broken = load_decoder(directory)
    spoil(broken, float("nan"), calls={0, 2})  # together, and alone: its row is asked for second
    tasks = [DecodeTask(row[:4].numpy().astype(np.int16), broken.initial_state(), 0.0) for row in codes]
    first, bad, last = decode_batch(broken, tasks)
    assert isinstance(bad, EngineError)
    assert "NaN or infinity" in str(bad)
    assert not isinstance(first, Exception)
    assert not isinstance(last, Exception)
    whole, _ = decoder.decode(codes[:1, :4], [decoder.initial_state()])
    assert snr_db(whole[0], torch.from_numpy(first.pcm) / 32767) > MIN_SNR_DB


def test_a_state_too_large_for_the_type_is_its_largest_value() -> None:
    from deployments.codec.decoder import _cast

    large, small = (DecoderState(3, (torch.tensor([1e6, -1e6, 0.5]).to(kind),)) for kind in (torch.float32, torch.half))
    assert _cast(large, small).tensors[0].tolist() == [65504.0, -65504.0, 0.5]
