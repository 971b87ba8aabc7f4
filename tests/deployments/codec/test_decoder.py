from pathlib import Path

import pytest
import torch
from torch import Tensor

from deployments.codec.backends import products
from deployments.codec.backends.registry import load_decoder
from deployments.codec.backends.torch_backend import TorchBackend, piece_rows
from deployments.codec.decoder import CodecDecoder, to_pcm16, warm_up
from deployments.codec.fold import FoldedWeights
from tests.clock import Clock
from tests.deployments.codec.backends.test_backends import stream

TOLERANCE = 1e-5  # the waveform has a standard deviation of 0.15


def test_frames_outside_the_window_still_shift_positions(decoder: CodecDecoder, codes: Tensor) -> None:
    """Sound depends on what came before, or the tests above would compare nothing."""
    fresh, _ = stream(decoder, codes[:1, 20:], [20])
    continued, _ = stream(decoder, codes[:1], [40])
    assert (fresh - continued[:, 20 * decoder.frame_samples :]).abs().max() > 0.01


def test_bfloat16_is_close(directory: Path, decoder: CodecDecoder, codes: Tensor) -> None:
    half = load_decoder(directory, precision="bfloat16")
    exact, _ = stream(decoder, codes, [8])
    rounded, _ = stream(half, codes, [8])
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).std() < 0.2 * exact.std()


def test_batches_grow_while_a_whole_call_is_short(decoder: CodecDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def decode(codes: Tensor, states: list[object]) -> None:
        clock.now_s += 0.004 * codes.shape[1] * len(states)

    monkeypatch.setattr(decoder, "decode", decode)
    monkeypatch.setattr("deployments.codec.decoder.time.monotonic", clock)
    assert warm_up(decoder, (1, 4), 0.02).largest_batches == {1: 4, 4: 1}


def test_pcm_rounds_to_nearest_and_clips() -> None:
    audio = torch.tensor([0.0, 1.0, -1.0, 1.5, -1.5, 0.4 / 32767, 0.6 / 32767])
    assert to_pcm16(audio).tolist() == [0, 32767, -32767, 32767, -32768, 0, 1]


def test_a_state_needs_rows_in_reach(decoder: CodecDecoder, codes: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (expected,) = decoder.decode(codes[:1, :35], [decoder.initial_state()])

    def error() -> float:
        (state,) = decoder.recall(codes[:1, :35], [decoder.initial_state()])
        pairs = zip(state.tensors, expected.tensors, strict=True)
        return max((own - other).abs().max().item() for own, other in pairs)

    assert isinstance(decoder.backend, TorchBackend)
    needed = decoder.backend.folded.rows_needed()
    assert error() < TOLERANCE
    for layer, rows in needed.items():
        monkeypatch.setattr(FoldedWeights, "rows_needed", lambda _, fewer=needed | {layer: rows // 2}: fewer)
        assert error() > TOLERANCE


def test_pieces_have_lengths_that_are_fast_with_every_torch() -> None:
    for time in range(160, 160 * 40, 160):
        rows = piece_rows(time, 384)
        assert rows % 16 == 0
        assert rows * 384 < 1.1 * 250_000


def test_few_rows_are_no_convolution(decoder: CodecDecoder, codes: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    convolve, lengths = products.TorchProduct._convolve, []

    def counted(self: products.TorchProduct, rows: Tensor) -> Tensor:
        lengths.append(rows.shape[1] - self._context)
        return convolve(self, rows)

    monkeypatch.setattr(products.TorchProduct, "_convolve", counted)
    for frames in (1, 4, 40):
        decoder.decode(codes[:, :frames], [decoder.initial_state()] * len(codes))
    assert lengths, "40 frames are many rows"
    assert min(lengths) >= products._ENOUGH_ROWS
