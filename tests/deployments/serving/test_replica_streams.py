"""A talker's audio meets its codes, and its reader learns how far it has come."""

from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from deployments import protocol
from deployments.errors import CodecLost, ReplicaLost, TalkerLost
from deployments.protocol import ClonePrompt, FinishReason, FrameChunk, PcmChunk, Reading, SynthesisRequest
from deployments.serving.failover import ReceivedProgress, with_failover
from deployments.serving.replica_streams import CodecAudio, OutgoingAudio, PendingFrames, TalkerAudio
from deployments.speech_detection import LeadingSilence
from tests.serve_app.fake import CUSTOM_VOICE

pytestmark = pytest.mark.anyio

SAMPLES, RATE = 240, 24000
NO_CODES = np.zeros((0, 2), np.int16)


def codes(*frames: int) -> np.ndarray:
    return np.array([[frame] * 2 for frame in frames], np.int16).reshape(-1, 2)


def pcm(count: int, level: int = 9000) -> np.ndarray:
    return np.full(count * SAMPLES, level, np.int16)


def test_audio_that_comes_later_meets_its_codes() -> None:
    frames = PendingFrames(SAMPLES)
    frames.add(FrameChunk(codes(1, 2, 3), 5))
    frames.add(FrameChunk(NO_CODES, 5, None, pcm(2).tobytes()))
    heard, audio = frames.take_audio()
    assert (heard[:, 0].tolist(), len(audio), frames.available) == ([1, 2], 2 * SAMPLES, 1)
    heard, audio = frames.take_audio()
    assert (heard.shape, len(audio)) == ((0, 2), 0)


def test_frames_that_exist_already_come_first() -> None:
    frames = PendingFrames(SAMPLES, codes(1, 2))
    frames.add(FrameChunk(codes(3), 5, FinishReason.STOP))
    assert frames.end_reason is None
    assert frames.take(9)[:, 0].tolist() == [1, 2, 3]
    assert frames.end_reason is FinishReason.STOP


def test_marks_and_the_prompt_of_a_recording_are_taken_once() -> None:
    frames, prompt = PendingFrames(SAMPLES), ClonePrompt(np.zeros(4, np.float32))
    readings = [Reading(0, (1.0,)), Reading(1, (2.0,))]
    frames.add(FrameChunk(codes(1), 5, marks=(("codes", 1),), clone_prompt=prompt, readings=(readings[0],)))
    frames.add(FrameChunk(codes(2), 4, readings=(readings[1],), trail=(("Talker#1", 1),)))
    frames.add(FrameChunk(codes(3), 4, trail=(("Talker#2", 2),)))
    assert frames.num_text_tokens == 5
    marks, read, taken, trail = frames.take_extras()
    assert ([stage for stage, _ in marks], taken) == (["codes", "from-talker"], prompt)
    assert (list(read), trail) == (readings, (("Talker#1", 1), ("Talker#2", 2)))
    assert frames.take_extras() == ((), (), None, ())


def test_what_is_held_back_as_quiet_is_not_delivered() -> None:
    audio = OutgoingAudio(PendingFrames(SAMPLES), LeadingSilence(RATE), position=7)
    assert audio.chunk(codes(1), pcm(1, level=0), None).position == 7
    assert audio.chunk(codes(2), pcm(1), None).position == 7 + 2 * SAMPLES
    assert audio.chunk(NO_CODES, pcm(0), FinishReason.STOP).position == 7 + 2 * SAMPLES


@pytest.mark.parametrize(("background", "calls"), [(False, 3), (True, 1)])
@pytest.mark.parametrize(("stream", "beat", "lost"), [
    (CodecAudio, PcmChunk(b"", NO_CODES, 0), CodecLost), (TalkerAudio, FrameChunk(NO_CODES, 0), TalkerLost),
])  # fmt: skip
async def test_a_segment_of_a_job_is_given_up_at_its_first_loss(
    stream: type[CodecAudio | TalkerAudio], beat: object, lost: type[ReplicaLost], *, background: bool, calls: int
) -> None:
    asked: list[SynthesisRequest] = []

    async def dying(request: SynthesisRequest) -> AsyncGenerator[Any, None]:
        asked.append(request)
        yield beat
        raise lost("gone", 3)

    heard = stream(SynthesisRequest("r", "Hi.", background=background), dying, CUSTOM_VOICE, each_chunk=lambda _: None)
    with pytest.raises(lost) as given_up:
        [chunk async for chunk in with_failover(heard)]
    assert (len(asked), given_up.value.beside) == (calls, 3)  # the desk of jobs decides what is tried again


def test_another_replica_goes_on_after_all_that_was_received() -> None:
    received = ReceivedProgress()
    received.add(FrameChunk(NO_CODES, 0), 0)
    assert received.progress is None
    received = ReceivedProgress(protocol.Progress(codes(1), SAMPLES))
    received.add(FrameChunk(codes(2, 3), 0), 2 * SAMPLES)
    progress = received.progress
    assert progress is not None
    assert (progress.codes[:, 0].tolist(), progress.samples, progress.in_hand_s) == ([1, 2, 3], 2 * SAMPLES, 0.0)
    received.add(FrameChunk(codes(4), 0), 3 * SAMPLES)
    received.deliver(1e-9)
    assert received.progress is not None
    assert received.progress.in_hand_s == 0.0, "a listener that waits has nothing in hand"
    received.deliver(60.0)
    progress = received.progress
    assert progress is not None
    assert 30.0 < progress.in_hand_s <= 60.0
    progress = ReceivedProgress(progress).progress  # of a replica that makes the rest, and loses the next stage
    assert progress is not None
    assert 30.0 < progress.in_hand_s <= 60.0
