"""The first frames come from the talker as audio; the stream goes on here as if nothing was."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from deployments.codec.batch import Decoded, DecodeTask, decode_batch
from deployments.codec.decoder import MIN_SNR_DB, CodecDecoder, to_pcm16
from deployments.codec.plan import ChunkPlan
from deployments.codec.pool.service import AllFrames
from deployments.codec.pool.stream import DecodingStart, StreamDecoder
from deployments.errors import TalkerLost
from deployments.protocol import ALL_FRAMES, Codes, FinishReason, FrameChunk, Progress, SynthesisRequest
from deployments.serving.failover import with_failover
from tests.clock import Clock
from tests.deployments.codec.pool.test_service import assert_within_one_lsb, collect, joined_codes, joined_pcm

pytestmark = pytest.mark.anyio
SAMPLE_RATE = 300
NUM_FRAMES = 40
Sizes = tuple[list[int], list[int]]  # of codes and of audio, in frames


class Talker:
    """Sends codes some frames at a time, and the audio of the first of them later, in pieces of its own."""

    def __init__(self, codes: Codes, pcm: np.ndarray, frame_samples: int, *, error: Exception | None = None) -> None:
        self._codes, self._pcm, self._frame_samples, self._error = codes, pcm, frame_samples, error
        self.closed = asyncio.Event()

    async def frames(self, code_sizes: Sequence[int], pcm_sizes: Sequence[int]) -> AsyncGenerator[FrameChunk, None]:
        sent = heard = 0
        num_heard = len(self._pcm) // self._frame_samples
        try:
            for num_codes, num_pcm in zip(cycle(code_sizes), cycle(pcm_sizes)):
                codes = self._codes[sent : sent + num_codes]
                sent += len(codes)
                count = min(num_pcm, sent - heard, num_heard - heard)
                pcm = self._pcm[heard * self._frame_samples : (heard + count) * self._frame_samples]
                heard += count
                over = sent == len(self._codes) and heard == min(num_heard, sent)
                if over and self._error is not None:
                    yield FrameChunk(codes, 3, None, pcm.tobytes())
                    raise self._error
                yield FrameChunk(codes, 3, FinishReason.STOP if over else None, pcm.tobytes())
                if over:
                    return
                await asyncio.sleep(0)
        finally:
            self.closed.set()


class Decode:
    def __init__(self, decoder: CodecDecoder) -> None:
        self._decoder = decoder
        self.tasks: list[DecodeTask] = []

    async def __call__(self, task: DecodeTask) -> Decoded:
        self.tasks.append(task)
        await asyncio.sleep(0)
        (outcome,) = decode_batch(self._decoder, [task])
        assert isinstance(outcome, Decoded), outcome
        return outcome


def whole(decoder: CodecDecoder, codes: Tensor) -> np.ndarray:
    audio, _ = decoder.decode(codes[None], [decoder.initial_state()])
    return to_pcm16(audio[0])


def start_of(decode: Decode, decoder: CodecDecoder, talker: Talker, frames: int, sizes: Sizes):  # type: ignore[no-untyped-def]
    stream = stream_of(decode, decoder, DecodingStart(decoder.initial_state()))
    return stream.decode_chunks(talker.frames(*sizes), gpu_frames=frames)


def stream_of(decode: Decode, decoder: CodecDecoder, start: DecodingStart) -> StreamDecoder:
    plan = ChunkPlan((1, 2, 4, 8, 12), frame_s=0.08)
    return StreamDecoder(decode, plan, start, frame_samples=decoder.frame_samples, sample_rate=SAMPLE_RATE)


@pytest.mark.parametrize("frames", [0, 1, 2, 12, 39, 40, 41, ALL_FRAMES])
@pytest.mark.parametrize("sizes", [([1], [1]), ([4, 1], [0, 1, 2]), ([40], [0, 0, 3]), ([0, 1, 0, 11], [9])])
async def test_any_share_gives_the_same_audio(
    decoder: CodecDecoder, codes: Tensor, frames: int, sizes: Sizes, fed: list[tuple[str, float, dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("deployments.codec.pool.stream.time", Clock())  # where chunks end follows from the lead
    expected = whole(decoder, codes[0])
    frames_pcm = expected[: frames * decoder.frame_samples]
    talker, decode = Talker(codes[0].numpy().astype(np.int16), frames_pcm, decoder.frame_samples), Decode(decoder)
    chunks = await collect(start_of(decode, decoder, talker, frames, sizes))
    pcm = joined_pcm(chunks)
    assert_within_one_lsb(pcm, expected)
    assert np.array_equal(joined_codes(chunks), codes[0].numpy())
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.STOP]
    assert [chunk.position for chunk in chunks] == list(np.cumsum([len(chunk.pcm) // 2 for chunk in chunks]))
    decoded = [len(task.codes) for task in decode.tasks if not task.state_only]
    assert sum(decoded) == max(0, NUM_FRAMES - frames)
    assert frames != 12 or decoded[0] == 8, "the ramp goes on behind the audio of the talker"
    assert sum(len(task.codes) for task in decode.tasks if task.state_only) in (0, frames)  # never twice
    by_talker = min(frames, NUM_FRAMES) * decoder.frame_samples / SAMPLE_RATE
    for pool, seconds in (("talker", by_talker), ("codec", len(expected) / SAMPLE_RATE - by_talker)):
        told = [value for name, value, tags in fed if (name, tags) == ("decoded_seconds_total", {"pool": pool})]
        assert sum(told) == pytest.approx(seconds)


async def test_the_border_of_precisions_is_not_heard(directory: Path, decoder: CodecDecoder, codes: Tensor) -> None:
    expected = whole(decoder, codes[0]).astype(int)
    border = 12 * decoder.frame_samples
    noisy = expected + np.random.default_rng(0).normal(0, expected.std() * 10 ** (-MIN_SNR_DB / 20), expected.shape)
    frames_pcm = noisy.round().astype(np.int16)[:border]
    talker, decode = Talker(codes[0].numpy().astype(np.int16), frames_pcm, decoder.frame_samples), Decode(decoder)
    pcm = joined_pcm(await collect(start_of(decode, decoder, talker, 12, ([4], [4])))).astype(int)
    assert pcm.shape == expected.shape
    assert np.abs(pcm[border:] - expected[border:]).max() <= 1
    steps = np.abs(np.diff(pcm))
    assert steps[border - 1] <= steps.max()
    assert abs(steps[border - 1] - abs(expected[border] - expected[border - 1])) < 4 * np.abs(noisy - expected).std()


async def test_an_error_comes_after_the_audio_of_all_codes(decoder: CodecDecoder, codes: Tensor) -> None:
    expected = whole(decoder, codes[0])
    talker = Talker(
        codes[0].numpy().astype(np.int16), expected[: 5 * decoder.frame_samples], decoder.frame_samples,
        error=TalkerLost("gone"),
    )  # fmt: skip
    heard = []
    with pytest.raises(TalkerLost):  # noqa: PT012
        async for chunk in start_of(Decode(decoder), decoder, talker, ALL_FRAMES, ([8], [1])):
            heard.append(chunk)  # noqa: PERF401
    pcm = joined_pcm(heard)
    assert_within_one_lsb(pcm, expected)


@pytest.mark.parametrize("chunks_read", [1, 3])
async def test_leaving_the_opening_leaves_nothing(decoder: CodecDecoder, codes: Tensor, chunks_read: int) -> None:
    before = asyncio.all_tasks()
    talker = Talker(codes[0].numpy().astype(np.int16), whole(decoder, codes[0]), decoder.frame_samples)
    decode = Decode(decoder)
    async with aclosing(start_of(decode, decoder, talker, 12, ([40], [2]))) as chunks:
        for _ in range(chunks_read):
            await anext(chunks)
    assert chunks_read == 1 or decode.tasks, "the recall begins beside the audio of the opening"
    assert talker.closed.is_set()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("known", [0, 4])
async def test_the_next_talker_brings_the_audio_that_the_lost_one_owes(known: int) -> None:
    """Also of a stream whose first frames came by another codec replica."""
    frame_samples, codes = 10, np.arange(40, dtype=np.int16)[:, None].repeat(4, axis=1)
    begun = Progress(codes[:known], known * frame_samples) if known else None
    asked: list[SynthesisRequest] = []

    async def generate(request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        asked.append(request)
        if len(asked) == 1:
            yield FrameChunk(codes[known:7], 3)
            yield FrameChunk(codes[:0], 3, None, bytes(3 * 2 * frame_samples))
            raise TalkerLost("gone")
        yield FrameChunk(codes[7:], 3, FinishReason.STOP, bytes(9 * 2 * frame_samples))

    request = SynthesisRequest("test", "Hello.", gpu_frames=12, resume=begun)
    chunks = [chunk async for chunk in with_failover(AllFrames(generate, request, frame_samples))]
    assert np.array_equal(joined_codes(chunks), codes[known:])
    first, second = asked
    assert (first.resume is None, first.gpu_frames) == (not known, 12)
    resume = second.resume
    assert resume is not None
    assert (len(resume.codes), resume.samples, second.gpu_frames) == (7, (known + 3) * frame_samples, 9)


@pytest.mark.parametrize("position", [1, 20])
@pytest.mark.parametrize("frames", [1, 12, ALL_FRAMES])
async def test_a_resumed_stream_is_recalled(decoder: CodecDecoder, codes: Tensor, position: int, frames: int) -> None:
    known, size = codes[0].numpy().astype(np.int16), decoder.frame_samples
    expected = whole(decoder, codes[0])[position * size :]
    talker, decode = Talker(known[position:], expected[: frames * size], size), Decode(decoder)
    start = DecodingStart(decoder.initial_state(), to_recall=known[:position], position=position * size)
    stream = stream_of(decode, decoder, start)
    chunks = await collect(stream.decode_chunks(talker.frames([4], [2]), gpu_frames=frames))
    pcm = joined_pcm(chunks)
    assert_within_one_lsb(pcm, expected)
    assert np.array_equal(joined_codes(chunks), known[position:])
    assert chunks[-1].position == NUM_FRAMES * size
    recalled = sum(len(task.codes) for task in decode.tasks if task.state_only)
    assert recalled == (0 if frames is ALL_FRAMES else position + frames)
