"""Runs where Triton is: on a GPU, or on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1)."""

import numpy as np
import pytest
import torch

from deployments.codec.backends.triton_slots import BATCHES
from deployments.codec.decoder import MIN_SNR_DB, snr_db, to_pcm16
from deployments.codec.fold import fold
from deployments.gpu.graphs import buckets
from talkray_tools.unfolded_codec import DecoderNetwork
from tests.deployments.interpreter import INTERPRETED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_do_what_checkpoints_say(network: DecoderNetwork, device: torch.device, dtype: torch.dtype) -> None:
    """Streams in different slots and at different positions, one of them a successor in its slot."""
    from deployments.codec.backends.triton_decoder import TritonDecoder

    folded = fold(network.state_dict(), network.config)
    decoder = TritonDecoder(folded, num_slots=3, code_ring=8, device=device, dtype=dtype)
    decoder.copies_tiles |= INTERPRETED  # of float16 alone
    codes = torch.randint(32, (2, 8, 4), generator=torch.Generator().manual_seed(0))
    parts: list[list[torch.Tensor]] = [[], []]
    slots = torch.tensor([2, 0, 3], device=device, dtype=torch.int32)  # 3 is the scratch slot
    for stream, slot in enumerate((2, 0)):
        decoder.reset(slot)
        decoder.codes[slot] = codes[1 - stream].short().to(device)
    decoder.decode(slots, 2)
    for stream, slot in enumerate((2, 0)):
        decoder.reset(slot)
        decoder.codes[slot] = codes[stream].short().to(device)
    for frames in (1, 2, 1):
        pcm = decoder.decode(slots, frames)[0].cpu()
        for stream in range(2):
            parts[stream].append(pcm[stream])
    expected = to_pcm16(network(codes[:, :4]))
    got = np.stack([torch.cat(part).numpy() for part in parts])
    if INTERPRETED and dtype is torch.float32:
        assert np.abs(got.astype(int) - expected).max() <= 1
    else:
        assert snr_db(torch.from_numpy(expected), torch.from_numpy(got)) >= MIN_SNR_DB


def test_a_slot_goes_on_from_what_another_one_remembered(network: DecoderNetwork, device: torch.device) -> None:
    from deployments.codec.backends.triton_decoder import TritonDecoder

    decoder = TritonDecoder(
        fold(network.state_dict(), network.config), num_slots=3, code_ring=8, device=device, dtype=torch.float32
    )
    decoder.codes[:] = torch.randint(32, (8, 4), generator=torch.Generator().manual_seed(0)).short().to(device)
    first, both = (torch.tensor(slots, device=device, dtype=torch.int32) for slots in ([2, 3], [2, 0]))
    decoder.decode(first, 2)
    decoder.decode(first, 1)
    state = decoder.state(2, 3)
    decoder.decode(both, 2)  # what comes behind the state does not change it, nor does what the other slot remembers
    decoder.reset(2)
    for slot in (2, 0):
        decoder.resume(slot, state)
    one, other = decoder.decode(both, 2)[0].cpu()
    assert torch.equal(one, other)
    expected = torch.from_numpy(to_pcm16(network(decoder.codes[:1, :5].cpu().long())))[0, -len(one) :]
    if INTERPRETED:
        assert (one.int() - expected).abs().max() <= 1
    else:
        assert snr_db(expected, one) >= MIN_SNR_DB


def test_buckets_cover_every_batch() -> None:
    for largest in (1, 3, 8, 64, 100, 130):
        sizes = buckets(largest, BATCHES)
        assert (sizes, sizes[-1]) == (sorted(set(sizes)), largest)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's numpy
def test_only_a_stream_that_is_not_finite_is_flagged(network: DecoderNetwork, device: torch.device) -> None:
    from deployments.codec.backends.triton_decoder import TritonDecoder

    folded = fold(network.state_dict(), network.config)
    decoder = TritonDecoder(folded, num_slots=3, code_ring=8, device=device, dtype=torch.float32)
    decoder.folded.tables[5] = torch.inf  # code 5 of codebook 0
    decoder.codes[1, 2, 0] = 5
    decoder.codes[2, 0, 0] = 5
    slots = torch.tensor([0, 1, 3], device=device, dtype=torch.int32)
    _, before = decoder.decode(slots, 2)
    _, now = decoder.decode(slots, 1)
    _, behind = decoder.decode(slots, 1)  # what a slot remembers is broken as well
    assert [flags.tolist() for flags in (before, now, behind)] == [[0, 0, 0], [0, 1, 0], [0, 1, 0]]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's numpy
def test_samples_are_clipped_and_flagged_unless_finite(device: torch.device) -> None:
    from deployments.codec.backends.triton_kernels import waveform_kernel

    values = torch.tensor([0.5, torch.inf, -torch.inf, torch.nan, 1e38, -2.0], device=device)
    x = torch.zeros(len(values), 3, 1, device=device)  # [streams, rows, channels]
    x[:, 0, 0] = values
    pcm = torch.empty(len(values) * 2, device=device, dtype=torch.int16)
    broken = torch.zeros(len(values), device=device, dtype=torch.int32)
    weight, bias = torch.ones(2, 1, device=device), torch.zeros(1, device=device)
    waveform_kernel[(1,)](
        x, weight, bias, pcm, broken, len(pcm), 2, 1, 3, 32767.0, taps=2, block_rows=32, block=1, pdl=False
    )
    assert broken.tolist() == [0, 1, 1, 1, 0, 0]
    assert pcm.view(-1, 2)[[0, 4, 5]].tolist() == [[16384, 0], [32767, 0], [-32767, 0]]


@pytest.mark.parametrize("rows", [1, 4, 32, 640, 8192, 491_520])
@pytest.mark.parametrize("columns", [96, 192, 288, 384, 1536, 6144])
@pytest.mark.parametrize(("streams", "copies"), [(1, False), (1, True), (7, True)])
def test_tiles_fit_the_gpu_and_waste_few_columns(rows: int, columns: int, streams: int, *, copies: bool) -> None:
    pytest.importorskip("triton", reason="needs Triton: make kernels installs it")
    from deployments.codec.backends.triton_decoder import Rows, choose_tiles

    shared_bytes = 232_448  # of an H200
    shape = Rows(streams, rows)
    tiles = choose_tiles(shape, 192, columns, value_bytes=2, weights=1, shared_bytes=shared_bytes, copies=copies)
    assert not tiles["copied"] or (copies and rows >= 16)
    assert tiles["copied"] or not (copies and rows == 8192)
    stage = (tiles["block_m"] + tiles["block_n"]) * tiles["block_k"] * 2
    assert stage * tiles["num_stages"] <= shared_bytes
    assert tiles["block_m"] <= max(32, streams * rows)
    columns_made = -(-columns // tiles["block_n"]) * tiles["block_n"]
    assert columns_made <= columns * 4 / 3
    if tiles["block_n"] > 64:
        assert columns_made == -(-columns // 64) * 64, "narrower tiles leave fewer empty"
