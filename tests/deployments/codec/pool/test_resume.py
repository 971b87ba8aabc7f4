"""A stream that another replica began goes on at the very next sample."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.codec.backends.registry import load_decoder
from deployments.codec.decoder import to_pcm16
from deployments.codec.pool.service import CodecService
from deployments.protocol import FinishReason, Progress, Reference
from tests.deployments.codec.pool.test_service import (
    REQUEST,
    Talker,
    assert_within_one_lsb,
    collect,
    joined_codes,
    joined_pcm,
    make_service,
    random_codes,
)

pytestmark = pytest.mark.anyio

CODES = random_codes(1, frames=60)
FRAME_SAMPLES = 1920


@pytest.fixture(scope="module")
def service(tiny_checkpoint: Callable[[str], Path]) -> CodecService:
    return make_service(tiny_checkpoint("CustomVoice"))


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Callable[[str], Path]) -> CodecService:
    return make_service(tiny_checkpoint("Base"))


async def test_a_lost_talker_does_not_show(service: CodecService) -> None:
    whole = await collect(service.decode_stream(REQUEST, Talker(CODES).generate))
    talker = Talker(CODES, dies_at=(0, 7, 7, 31))
    chunks = await collect(service.decode_stream(REQUEST, talker.generate))
    assert talker.prefixes == [0, 0, 7, 7, 31]
    assert np.array_equal(joined_codes(chunks), CODES)
    assert_within_one_lsb(joined_pcm(chunks), joined_pcm(whole))
    assert chunks[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("kind", ["plain", "clone"])
@pytest.mark.parametrize("num_chunks", range(8))
async def test_any_chunk_can_be_the_last(service: CodecService, base: CodecService, kind: str, num_chunks: int) -> None:
    audio = np.random.default_rng(0).uniform(-0.5, 0.5, 24000).astype(np.float32)
    clone = replace(REQUEST, reference=Reference(audio, "What is said."))
    request, codec = (REQUEST, service) if kind == "plain" else (clone, base)
    whole = await collect(codec.decode_stream(request, Talker(CODES).generate))
    assert len(whole) >= 8
    have = whole[:num_chunks]
    codes = joined_codes(have) if have else CODES[:0]
    resume = Progress(codes, have[-1].position if have else 0)
    talker = Talker(CODES)
    rest = await collect(codec.decode_stream(replace(request, resume=resume), talker.generate))
    assert talker.prefixes == [len(codes)]
    assert np.array_equal(joined_codes(have + rest), CODES)
    assert_within_one_lsb(joined_pcm(have + rest), joined_pcm(whole))
    assert rest[-1].position == whole[-1].position == len(CODES) * FRAME_SAMPLES


@pytest.mark.parametrize("position", [0, 1, 1919, 1920, 5000, 20 * FRAME_SAMPLES])
async def test_any_sample_can_be_next(service: CodecService, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = joined_pcm(await collect(service.decode_stream(REQUEST, Talker(CODES).generate)))
    request, talker = replace(REQUEST, resume=Progress(CODES[:20], position)), Talker(CODES)
    monkeypatch.setattr(service.placement, "talker_on_gpu", True)
    chunks = await collect(service.decode_stream(request, talker.generate))
    assert (talker.requests[0].gpu_frames > 0) is (position == 20 * FRAME_SAMPLES), "if no audio is owed"
    assert np.array_equal(joined_codes(chunks), CODES[20:])
    assert_within_one_lsb(joined_pcm(chunks), whole[position:])


async def test_all_frames_may_exist_already(service: CodecService) -> None:
    request = replace(REQUEST, resume=Progress(CODES, len(CODES) * FRAME_SAMPLES))
    chunks = await collect(service.decode_stream(request, Talker(CODES).generate))
    assert joined_pcm(chunks).size == 0
    assert chunks[-1].finish_reason is FinishReason.STOP


async def test_a_quiet_start_is_trimmed_once(service: CodecService) -> None:
    """Whoever has codes and no sample of them has heard nothing yet."""
    trimming = replace(REQUEST, leading_silence=False)
    whole = await collect(service.decode_stream(trimming, Talker(CODES).generate))
    for num_codes, position in ((5, 0), (5, 5 * FRAME_SAMPLES)):
        request = replace(trimming, resume=Progress(CODES[:num_codes], position))
        rest = joined_pcm(await collect(service.decode_stream(request, Talker(CODES).generate)))
        expected = joined_pcm(whole) if position == 0 else joined_pcm(whole)[-(len(CODES) - 5) * FRAME_SAMPLES :]
        assert_within_one_lsb(rest, expected)


@pytest.mark.parametrize("num_frames", [1, 8, 13, 100, 400])
def test_a_recalled_state_is_one_that_decoded_all(tiny_checkpoint: Callable[[str], Path], num_frames: int) -> None:
    decoder = load_decoder(tiny_checkpoint("CustomVoice") / "speech_tokenizer")
    codes = torch.from_numpy(random_codes(2, frames=num_frames + 12).astype(np.int64))
    whole, _ = decoder.decode(codes[None], [decoder.initial_state()])
    rest, _ = decoder.decode(codes[None, num_frames:], [decoder.state_after(codes[:num_frames])])
    expected = to_pcm16(whole)[0, num_frames * FRAME_SAMPLES :]
    assert_within_one_lsb(to_pcm16(rest)[0], expected)


async def test_leaving_a_resumed_stream_closes_it(service: CodecService) -> None:
    request = replace(REQUEST, resume=Progress(CODES[:20], 0))
    async with aclosing(service.decode_stream(request, Talker(CODES).generate)) as chunks:
        assert (await anext(chunks)).pcm
