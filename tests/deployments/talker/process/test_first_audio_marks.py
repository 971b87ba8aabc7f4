"""Marks of requests in the engine process."""

from dataclasses import replace

import numpy as np
import pytest

from deployments.protocol import ALL_FRAMES, FinishReason, FrameChunk, SynthesisRequest
from deployments.talker.process.engine_process import FirstAudioMarks

CODES, NO_CODES = np.zeros((1, 4), np.int16), np.zeros((0, 4), np.int16)
MARKED = SynthesisRequest("r", "Hello.", marks=(("received", 0),))


def begun(request: SynthesisRequest) -> FirstAudioMarks:
    first_audio = FirstAudioMarks()
    first_audio.track(1, request, arrival=("to-engine", 1))
    return first_audio


def stages(first_audio: FirstAudioMarks, chunk: FrameChunk) -> list[str]:
    ((_, followed),) = first_audio.mark_first_audio(((1, chunk),))
    return [stage for stage, _ in followed.marks]


def test_first_codes_bring_the_marks_where_a_codec_decodes() -> None:
    first_audio = begun(MARKED)
    assert stages(first_audio, FrameChunk(CODES, 1)) == ["received", "to-engine", "prompt", "codes"]
    assert stages(first_audio, FrameChunk(CODES, 1)) == []


@pytest.mark.parametrize("codes_first", [True, False])
def test_first_audio_brings_them_where_the_engine_decodes(codes_first: bool) -> None:
    first_audio = begun(replace(MARKED, gpu_frames=ALL_FRAMES))
    if codes_first:
        assert stages(first_audio, FrameChunk(CODES, 1)) == []
    chunk = FrameChunk(NO_CODES if codes_first else CODES, 1, None, b"12")
    assert stages(first_audio, chunk) == ["received", "to-engine", "prompt", "codes", "audio"]


def test_a_stream_that_ends_without_either_is_not_kept() -> None:
    first_audio = begun(replace(MARKED, gpu_frames=ALL_FRAMES))
    assert "prompt" in stages(first_audio, FrameChunk(NO_CODES, 1, FinishReason.STOP))
    assert stages(first_audio, FrameChunk(CODES, 1, None, b"12")) == []


def test_other_requests_are_left_alone() -> None:
    first_audio = begun(SynthesisRequest("r", "Hello."))
    chunks = ((1, FrameChunk(CODES, 1)),)
    assert first_audio.mark_first_audio(chunks) is chunks


def test_a_request_that_is_given_up_is_forgotten() -> None:
    first_audio = begun(MARKED)
    first_audio.end(1)
    assert stages(first_audio, FrameChunk(CODES, 1)) == []
