"""Streams that a talker decodes to the end, among talkers that die: every sample comes once."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from deployments.errors import EngineError, Moved, TalkerLost, TalkrayError
from deployments.protocol import ALL_FRAMES, FinishReason, FrameChunk, ModelInfo, ModelKind, PcmChunk, SynthesisRequest
from deployments.serving.failover import with_failover
from deployments.serving.replica_streams import TalkerAudio

pytestmark = pytest.mark.anyio

GROUPS, SAMPLES, FRAMES = 2, 480, 8
INFO = ModelInfo("m", ModelKind.CUSTOM_VOICE, ("ryan",), (), False, 24000, SAMPLES, GROUPS, 100)
REQUEST = SynthesisRequest("r", "Hello.", voice="ryan", leading_silence=True)
NO_CODES = np.zeros((0, GROUPS), np.int16)


def pcm(frame: int) -> bytes:
    return np.full(SAMPLES, 1000 + frame, np.int16).tobytes()


def codes(*frames: int) -> np.ndarray:
    return np.array([[frame] * GROUPS for frame in frames], np.int16).reshape(-1, GROUPS)


class Talkers:
    """Each brings so many frames and then the audio of so many fewer, until the error that ends it."""

    def __init__(self, *scripts: tuple[int, int, TalkrayError | None]) -> None:
        self._scripts = list(scripts)
        self.asked: list[SynthesisRequest] = []

    async def __call__(self, request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        self.asked.append(request)
        frames, mute, error = self._scripts.pop(0)
        known = 0 if request.prefix is None else len(request.prefix)
        heard = 0 if request.resume is None else request.resume.samples // SAMPLES
        yield FrameChunk(NO_CODES, 3)
        for frame in range(known, known + frames):
            yield FrameChunk(codes(frame), 3)
        audio = b"".join(pcm(frame) for frame in range(heard, known + frames - mute))
        if audio:
            yield FrameChunk(NO_CODES, 3, None, audio)
        if error is not None:
            raise error
        yield FrameChunk(NO_CODES, 3, FinishReason.STOP)


async def listen(talkers: Talkers, request: SynthesisRequest = REQUEST) -> list[PcmChunk]:
    async with aclosing(with_failover(TalkerAudio(request, talkers, INFO))) as chunks:
        return [chunk async for chunk in chunks]


async def test_audio_comes_with_its_codes() -> None:
    talkers = Talkers((FRAMES, 0, None))
    chunks = await listen(talkers)
    assert talkers.asked[0].gpu_frames == ALL_FRAMES
    assert b"".join(chunk.pcm for chunk in chunks) == b"".join(map(pcm, range(FRAMES)))
    assert np.concatenate([chunk.codes for chunk in chunks])[:, 0].tolist() == list(range(FRAMES))
    assert [chunk.position for chunk in chunks] == [FRAMES * SAMPLES] * 2
    assert chunks[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("error", [TalkerLost("gone"), Moved("drains")])
async def test_another_talker_goes_on_after_what_was_heard(error: TalkrayError) -> None:
    talkers = Talkers((3, 1, error), (2, 2, error), (FRAMES - 5, 0, None))
    chunks = await listen(talkers)
    assert b"".join(chunk.pcm for chunk in chunks) == b"".join(map(pcm, range(FRAMES)))
    assert np.concatenate([chunk.codes for chunk in chunks])[:, 0].tolist() == list(range(FRAMES))
    resumes = [asked.resume for asked in talkers.asked]
    assert [resume and (len(resume.codes), resume.samples // SAMPLES) for resume in resumes] == [None, (3, 2), (5, 3)]


async def test_the_next_talker_learns_what_the_listener_has_in_hand() -> None:
    talkers = Talkers((500, 0, TalkerLost("gone")), (0, 0, TalkerLost("gone")), (1, 0, None))
    await listen(talkers, replace(REQUEST, ignore_eos=True))
    resumes = [asked.resume for asked in talkers.asked]
    assert resumes[0] is None
    for resume in resumes[1:]:
        assert resume is not None
        assert 5.0 < resume.in_hand_s <= 10.0  # of 500 frames of 20 ms


async def test_speech_that_is_missing_is_an_error() -> None:
    with pytest.raises(EngineError, match="2 frames without audio"):
        await listen(Talkers((FRAMES, 2, None)))


@pytest.mark.parametrize("kept", [False, True])
async def test_quiet_leading_frames_are_dropped_unless_asked_for(kept: bool) -> None:
    async def quiet_first(request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        loud = np.full(SAMPLES, 9000, np.int16).tobytes()
        yield FrameChunk(codes(0, 1), 3, None, bytes(4 * SAMPLES))
        yield FrameChunk(codes(2), 3, FinishReason.STOP, loud)

    request = SynthesisRequest("r", "Hello.", voice="ryan", leading_silence=kept)
    async with aclosing(with_failover(TalkerAudio(request, quiet_first, INFO))) as chunks:
        quiet, sound = [chunk async for chunk in chunks]
    assert (len(quiet.pcm), len(quiet.codes)) == (4 * SAMPLES if kept else 0, 2)
    assert 2 * SAMPLES <= len(sound.pcm) < 6 * SAMPLES
    assert (len(sound.pcm) == 2 * SAMPLES) is kept
