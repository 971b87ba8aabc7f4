"""What every backend promises: how a stream is cut into chunks, and who shares its calls, is not heard."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import cycle

import numpy as np
import pytest
import torch
from torch import Tensor

from deployments.codec.backends import torch_backend
from deployments.codec.backends.c_kernels import MATRIX_UNITS, MULTIPLIES_FLOATS
from deployments.codec.backends.registry import choose_decoders
from deployments.codec.backends.torch_backend import TorchBackend
from deployments.codec.backends.triton_slots import PRECISIONS, Precision, TritonSlots
from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.decoder import MIN_SNR_DB, CodecDecoder, snr_db, to_pcm16
from deployments.codec.decoder_state import DecoderState
from deployments.codec.fold import FoldedWeights, fold
from deployments.codec.plain_slots import PlainSlots
from deployments.codec.plan import GPU_RAMP
from deployments.codec.slots import SlotDecoder
from deployments.errors import EngineError
from talkray_tools.random_codec import randomize_decoder
from talkray_tools.unfolded_codec import DecoderNetwork
from tests.deployments.codec.conftest import CONFIG

# Its products are whole blocks, as kernels for CPUs and for GPUs want them.
_WHOLE_BLOCKS = {"codebook_dim": 64, "decoder_dim": 128, "head_dim": 32, "hidden_size": 64, "latent_dim": 64}


@cache
def weights(*, whole_blocks: bool) -> FoldedWeights:
    changes = {**_WHOLE_BLOCKS, "intermediate_size": 96} if whole_blocks else {}
    shape = {**CONFIG["decoder_config"], **changes}  # type: ignore[dict-item]
    network = DecoderNetwork(SpeechTokenizerConfig.from_dict({**CONFIG, "decoder_config": shape}).decoder)
    randomize_decoder(network, generator=torch.Generator().manual_seed(7))
    return fold(network.state_dict(), network.config)


@dataclass(frozen=True)
class Row:
    """A backend, and by how much its audio may depend on cuts and company."""

    name: str
    make: Callable[[], CodecDecoder]
    least_db: float  # 16 bits round off at about 77 dB here
    skip: str = ""  # why it cannot run on this machine


BACKENDS = (
    Row("torch, float32", lambda: CodecDecoder(TorchBackend(weights(whole_blocks=False))), 90.0),
    Row("torch, bfloat16", lambda: CodecDecoder(TorchBackend(weights(whole_blocks=False), "bfloat16")), 30.0),
    Row(
        "cpu kernels, bfloat16",
        lambda: CodecDecoder(TorchBackend(weights(whole_blocks=True), "bfloat16")),
        30.0,
        "" if MATRIX_UNITS else "needs a CPU that multiplies bfloat16",
    ),
    Row(
        "cpu kernels, float32",
        lambda: CodecDecoder(TorchBackend(weights(whole_blocks=True))),
        90.0,
        "" if MULTIPLIES_FLOATS else "needs a CPU with AVX2 only",
    ),
)


@pytest.fixture(params=BACKENDS, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Row:
    param: Row = request.param
    if param.skip:
        pytest.skip(param.skip)
    return param


@pytest.fixture
def decoder(row: Row, monkeypatch: pytest.MonkeyPatch) -> CodecDecoder:
    monkeypatch.setattr(torch_backend, "_POSITIONS", 8)  # streams outgrow the first angles
    return row.make()


@pytest.fixture
def codes(decoder: CodecDecoder) -> Tensor:  # [3 streams, 40 frames, num_quantizers]
    size = (3, 40, decoder.config.num_quantizers)
    return torch.randint(decoder.config.codebook_size, size, generator=torch.Generator().manual_seed(0))


def stream(decoder: CodecDecoder, codes: Tensor, sizes: list[int]) -> tuple[Tensor, list[DecoderState]]:
    """Decode codes [B, frames, groups] in chunks of the given sizes, repeated."""
    states, parts, start = [decoder.initial_state()] * len(codes), [], 0
    for size in cycle(sizes):
        if start >= codes.shape[1]:
            break
        audio, states = decoder.decode(codes[:, start : start + size], states)
        parts.append(audio)
        start += size
    return torch.cat(parts, dim=1), states


@pytest.mark.parametrize("sizes", [[1], [4], [3, 1, 17], [25], [1, 2, 4, 8, 12]])
def test_streamed_equals_whole(row: Row, decoder: CodecDecoder, codes: Tensor, sizes: list[int]) -> None:
    whole, _ = stream(decoder, codes, [codes.shape[1]])
    streamed, _ = stream(decoder, codes, sizes)
    assert streamed.shape == whole.shape == (3, 40 * decoder.frame_samples)
    assert streamed.dtype == torch.float32
    assert streamed.abs().max() <= 1
    assert streamed.std() > 0.01, "it is audible"
    assert snr_db(whole, streamed) > row.least_db


def test_batched_equals_alone_at_different_positions(row: Row, decoder: CodecDecoder, codes: Tensor) -> None:
    positions = [0, 2, 30]  # none, part, and more than all of the attention window
    alone, states = [], []
    for own, position in zip(codes, positions, strict=True):
        audio, _ = stream(decoder, own[None, : position + 5], [position + 5])
        alone.append(audio[0, position * decoder.frame_samples :])
        states += stream(decoder, own[None, :position], [position])[1] if position else [decoder.initial_state()]
    chunk = torch.stack([own[position : position + 5] for own, position in zip(codes, positions, strict=True)])
    batched, after = decoder.decode(chunk, states)
    assert snr_db(torch.stack(alone), batched) > row.least_db
    assert [state.position for state in after] == [5, 7, 35]


def test_a_state_can_be_decoded_from_again(decoder: CodecDecoder, codes: Tensor) -> None:
    before = [tensor.clone() for tensor in decoder.initial_state().tensors]
    _, (state,) = stream(decoder, codes[:1, :9], [9])
    first, _ = decoder.decode(codes[:1, 9:12], [state])
    again, _ = decoder.decode(codes[:1, 9:12], [state])
    assert torch.equal(first, again)
    assert all(map(torch.equal, before, decoder.initial_state().tensors))


@pytest.mark.parametrize("known", [0, 3, 17])
def test_advancing_leaves_what_decoding_leaves(row: Row, decoder: CodecDecoder, codes: Tensor, known: int) -> None:
    states = stream(decoder, codes[:, :known], [max(1, known)])[1] if known else [decoder.initial_state()] * 3
    follow = min(decoder.config.convolved_frames, 35 - known - 1)
    for begin, end in ((known, 35 - follow), (35 - follow, 35)):
        states = decoder.recall(codes[:, begin:end], states, followed_by=35 - end)
    audio, _ = decoder.decode(codes[:, 35:], states)
    whole, _ = stream(decoder, codes, [40])
    assert snr_db(whole[:, 35 * decoder.frame_samples :], audio) > row.least_db


def test_a_code_in_no_codebook_is_an_error(decoder: CodecDecoder, codes: Tensor) -> None:
    last = decoder.config.codebook_size - 1
    for bad in (-1, last + 1, 2**15 - 1):
        broken = codes[:1, :2].clone()
        broken[0, 1, -1] = bad
        with pytest.raises(EngineError, match=f"not within 0 to {last}"):
            decoder.decode(broken, [decoder.initial_state()])
    with pytest.raises(EngineError, match="codes, the codec takes"):
        decoder.decode(codes[:1, :2, :-1], [decoder.initial_state()])


def triton_slots(precision: Precision) -> SlotDecoder:
    exact = CodecDecoder(TorchBackend(folded := weights(whole_blocks=True)))
    device = torch.device("cuda")
    slots = TritonSlots(folded, num_slots=4, device=device, precision=precision, load_float32=lambda: exact)
    slots.capture()
    return slots


_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
SLOTS = [
    pytest.param(lambda: PlainSlots(CodecDecoder(TorchBackend(weights(whole_blocks=True))), num_slots=4), id="plain"),
    *(
        pytest.param(lambda kind=kind: triton_slots(kind), id=f"triton, {kind.name}", marks=_GPU)
        for kind in PRECISIONS
        if kind.name != "bfloat16"
    ),
]


@pytest.mark.parametrize("make", SLOTS)
def test_slots_hold_streams_of_the_decoder(make: Callable[[], SlotDecoder]) -> None:
    """Several together, one that goes on in another slot from what its own remembers, and one behind a recording."""
    slots, total = make(), sum(GPU_RAMP)
    codes = torch.randint(32, (3, total, 4), generator=torch.Generator().manual_seed(0))
    exact = CodecDecoder(TorchBackend(weights(whole_blocks=True)))
    expected = torch.from_numpy(to_pcm16(exact.decode(codes, [exact.initial_state()] * 3)[0]))
    for slot in range(3):
        slots.start_slot(slot)
        slots.write([slot] * total, range(total), codes[slot].short())
    parts = [np.stack([np.asarray(pcm) for pcm in slots.decode(range(3), frames).result()]) for frames in GPU_RAMP]
    assert snr_db(expected, torch.from_numpy(np.concatenate(parts, axis=1))) >= MIN_SNR_DB
    slots.start_slot(0)
    slots.write([0] * total, range(total), codes[0].short())
    slots.decode([0], 4).result()
    slots.start_slot(3, slots.state(0))
    slots.write([3] * total, range(total), codes[0].short())
    (pcm,) = slots.decode([3], 8).result()
    samples = exact.frame_samples
    assert snr_db(expected[0, 4 * samples : 12 * samples], torch.from_numpy(np.asarray(pcm))) >= MIN_SNR_DB
    for recalled in (3, total - 8):
        slots.start_slot(1)
        slots.write([1] * total, range(total), codes[0].short())
        slots.recall(1, recalled)
        (pcm,) = slots.decode([1], 8).result()
        heard = expected[0, recalled * samples : (recalled + 8) * samples]
        assert snr_db(heard, torch.from_numpy(np.asarray(pcm))) >= MIN_SNR_DB


def test_frames_that_are_no_codes_end_their_stream_alone() -> None:
    slots = PlainSlots(CodecDecoder(TorchBackend(weights(whole_blocks=True))), num_slots=3)
    for slot, code in enumerate((1, 99, 1)):
        slots.start_slot(slot)
        slots.write([slot], [0], torch.full((1, 4), code))
    assert [slots.largest_batch(frames) for frames in (1, 192, 384, 999)] == [3, 2, 1, 1]
    first, broken, last = slots.decode(range(3), 1).result()
    assert isinstance(broken, EngineError)
    assert np.array_equal(first, last)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_only_a_gpu_is_asked_what_it_can(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec replica on a CPU sees the GPU of its host, which belongs to the talker."""

    def capability(asked: torch.device) -> tuple[int, int]:
        assert asked.type == "cuda", f"Expected a cuda device, but got: {asked}"
        return 9, 0

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", capability)
    shape = {**CONFIG["decoder_config"], **_WHOLE_BLOCKS, "intermediate_size": 96}  # type: ignore[dict-item]
    config = SpeechTokenizerConfig.from_dict({**CONFIG, "decoder_config": shape})
    assert config.decoder.suits_matrix_units
    expected = PlainSlots if device == "cpu" else TritonSlots
    assert choose_decoders(config, torch.device(device)).slots is expected
