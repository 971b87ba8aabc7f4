from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deployments.codec.backends import products
from deployments.codec.backends.torch import TorchBackend, piece_rows
from deployments.codec.decoder import CodecDecoder, to_pcm16
from deployments.codec.fold import FoldedDecoder
from deployments.codec.state import DecoderState
from deployments.errors import EngineError
from talkray_tools.unfolded_codec import DecoderNetwork

TOLERANCE = 1e-5  # the waveform has a standard deviation of 0.15


def stream(decoder: CodecDecoder, codes: Tensor, sizes: list[int]) -> tuple[Tensor, list[DecoderState]]:
    """Decode codes [B, frames, groups] in chunks of the given sizes, repeated."""
    states = [decoder.initial_state()] * len(codes)
    parts: list[Tensor] = []
    start = 0
    for size in cycle(sizes):
        if start >= codes.shape[1]:
            return torch.cat(parts, dim=1), states
        audio, states = decoder.decode(codes[:, start : start + size], states)
        parts.append(audio)
        start += size
    raise AssertionError


@pytest.mark.parametrize("sizes", [[1], [4], [3, 1, 17], [25], [1, 2, 4, 8, 12]])
def test_streamed_equals_whole(decoder: CodecDecoder, codes: Tensor, sizes: list[int]) -> None:
    whole, _ = stream(decoder, codes, [codes.shape[1]])
    streamed, _ = stream(decoder, codes, sizes)
    assert streamed.shape == whole.shape == (3, 40 * decoder.frame_samples)
    assert (streamed - whole).abs().max() < TOLERANCE
    assert np.abs(to_pcm16(streamed).astype(int) - to_pcm16(whole)).max() <= 1


def test_the_folded_pass_computes_what_the_checkpoint_says(
    networks: tuple[DecoderNetwork, object], decoder: CodecDecoder, codes: Tensor
) -> None:
    folded, _ = stream(decoder, codes, [7])
    with torch.no_grad():
        unfolded = networks[0](codes)
    assert (folded - unfolded).abs().max() < TOLERANCE


def test_batched_equals_alone_at_different_positions(decoder: CodecDecoder, codes: Tensor) -> None:
    positions = [0, 2, 30]  # none, part, and more than all of the attention window
    alone, states = [], []
    for row, position in zip(codes, positions, strict=True):
        audio, _ = stream(decoder, row[None, : position + 5], [position + 5])
        alone.append(audio[0, position * decoder.frame_samples :])
        states.append(
            stream(decoder, row[None, :position], [max(1, position)])[1][0] if position else decoder.initial_state()
        )
    chunk = torch.stack([row[position : position + 5] for row, position in zip(codes, positions, strict=True)])
    batched, after = decoder.decode(chunk, states)
    assert (batched - torch.stack(alone)).abs().max() < TOLERANCE
    assert [state.position for state in after] == [5, 7, 35]


def test_a_state_can_be_decoded_from_again(decoder: CodecDecoder, codes: Tensor) -> None:
    before = [tensor.clone() for tensor in decoder.initial_state().tensors]
    _, (state,) = stream(decoder, codes[:1, :9], [9])
    first, _ = decoder.decode(codes[:1, 9:12], [state])
    again, _ = decoder.decode(codes[:1, 9:12], [state])
    assert torch.equal(first, again)
    assert all(map(torch.equal, before, decoder.initial_state().tensors))


def test_state_shapes_never_change(decoder: CodecDecoder, codes: Tensor) -> None:
    shapes = [tensor.shape for tensor in decoder.initial_state().tensors]
    for frames in (1, 3, 40):
        _, states = stream(decoder, codes[:2, :frames], [frames])
        assert all([tensor.shape for tensor in state.tensors] == shapes for state in states)


def test_frames_outside_the_window_still_shift_positions(decoder: CodecDecoder, codes: Tensor) -> None:
    """Sound depends on what came before, or the tests above would compare nothing."""
    fresh, _ = stream(decoder, codes[:1, 20:], [20])
    continued, _ = stream(decoder, codes[:1], [40])
    assert (fresh - continued[:, 20 * decoder.frame_samples :]).abs().max() > 0.01


@pytest.mark.parametrize("bad", [-1, 32, 2**15 - 1])
def test_a_code_in_no_codebook_is_an_error(decoder: CodecDecoder, codes: Tensor, bad: int) -> None:
    broken = codes[:1, :2].clone()
    broken[0, 1, 3] = bad
    with pytest.raises(EngineError, match="not within 0 to 31"):
        decoder.decode(broken, [decoder.initial_state()])


def test_a_wrong_number_of_codes_is_an_error(decoder: CodecDecoder, codes: Tensor) -> None:
    with pytest.raises(EngineError, match="3 codes, the codec takes 4"):
        decoder.decode(codes[:1, :2, :3], [decoder.initial_state()])


def test_bfloat16_is_close(directory: Path, decoder: CodecDecoder, codes: Tensor) -> None:
    half = CodecDecoder.load(directory, precision="bfloat16")
    exact, _ = stream(decoder, codes, [8])
    rounded, _ = stream(half, codes, [8])
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).std() < 0.2 * exact.std()


def test_random_weights_are_audible_and_reproducible(decoder: CodecDecoder, codes: Tensor) -> None:
    audio, _ = stream(decoder, codes, [40])
    assert 0.05 < audio.std() < 0.4


def test_pcm_rounds_to_nearest_and_clips() -> None:
    audio = torch.tensor([0.0, 1.0, -1.0, 1.5, -1.5, 0.4 / 32767, 0.6 / 32767])
    assert to_pcm16(audio).tolist() == [0, 32767, -32767, 32767, -32768, 0, 1]


@pytest.mark.parametrize("known", [0, 3, 17])
def test_advancing_leaves_the_state_that_decoding_leaves(decoder: CodecDecoder, codes: Tensor, known: int) -> None:
    states = stream(decoder, codes[:, :known], [max(1, known)])[1] if known else [decoder.initial_state()] * 3
    advanced = decoder.advance(codes[:, known:35], states)
    audio, _ = decoder.decode(codes[:, 35:], advanced)
    whole, _ = stream(decoder, codes, [40])
    assert (audio - whole[:, 35 * decoder.frame_samples :]).abs().max() < TOLERANCE


def test_a_state_needs_no_rows_but_those_that_reach_it(
    decoder: CodecDecoder, codes: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (expected,) = decoder.decode(codes[:1, :35], [decoder.initial_state()])

    def error() -> float:
        (state,) = decoder.advance(codes[:1, :35], [decoder.initial_state()])
        pairs = zip(state.tensors, expected.tensors, strict=True)
        return max((own - other).abs().max().item() for own, other in pairs)

    assert isinstance(decoder.backend, TorchBackend)
    reached = decoder.backend.folded.reached()
    assert error() < TOLERANCE
    for layer, rows in reached.items():
        monkeypatch.setattr(FoldedDecoder, "reached", lambda _, fewer=reached | {layer: rows // 2}: fewer)
        assert error() > TOLERANCE


def test_frames_behind_which_many_others_follow_cost_no_convolution(decoder: CodecDecoder, codes: Tensor) -> None:
    states, follow = [decoder.initial_state()] * 3, decoder.config.convolved_frames
    for begin, end in ((0, 35 - follow), (35 - follow, 35)):
        states = decoder.advance(codes[:, begin:end], states, followed_by=35 - end)
    audio, _ = decoder.decode(codes[:, 35:], states)
    whole, _ = stream(decoder, codes, [40])
    assert (audio - whole[:, 35 * decoder.frame_samples :]).abs().max() < TOLERANCE


def test_pieces_have_lengths_that_are_fast_with_every_torch() -> None:
    for time in range(160, 160 * 40, 160):
        rows = piece_rows(time, 384)
        assert rows % 16 == 0
        assert rows * 384 < 1.1 * 250_000


def test_a_handful_of_rows_is_never_a_convolution(
    decoder: CodecDecoder, codes: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    convolve, lengths = products.Product._convolve, []

    def counted(self: products.Product, rows: Tensor) -> Tensor:
        lengths.append(rows.shape[1] - self._context)
        return convolve(self, rows)

    monkeypatch.setattr(products.Product, "_convolve", counted)
    for frames in (1, 4, 40):
        decoder.decode(codes[:, :frames], [decoder.initial_state()] * len(codes))
    assert lengths, "40 frames are many rows"
    assert min(lengths) >= products._ENOUGH_ROWS
