"""Marks of requests in the engine process."""

import numpy as np
import pytest

from deployments.protocol import ALL_FRAMES, FinishReason, FrameChunk, GenerateRequest, Mark, SynthesisRequest
from deployments.talker.trails import Trails

CODES, NO_CODES = np.zeros((1, 4), np.int16), np.zeros((0, 4), np.int16)
MARKED = SynthesisRequest("r", "Hello.", marks=(Mark("received", 0),))


def begun(request: GenerateRequest) -> Trails:
    trails = Trails()
    with trails.begin(1, request):
        pass
    return trails


def stages(trails: Trails, chunk: FrameChunk) -> list[str]:
    ((_, followed),) = trails.follow([(1, chunk)])
    return [mark.stage for mark in followed.marks]


def test_first_codes_bring_the_marks_where_a_codec_decodes() -> None:
    trails = begun(GenerateRequest(MARKED))
    assert stages(trails, FrameChunk(CODES, 1)) == ["received", "to-engine", "prompt", "codes"]
    assert stages(trails, FrameChunk(CODES, 1)) == []


@pytest.mark.parametrize("codes_first", [True, False])
def test_first_audio_brings_them_where_the_engine_decodes(codes_first: bool) -> None:
    trails = begun(GenerateRequest(MARKED, gpu_frames=ALL_FRAMES))
    if codes_first:
        assert stages(trails, FrameChunk(CODES, 1)) == []
    chunk = FrameChunk(NO_CODES if codes_first else CODES, 1, None, b"12")
    assert stages(trails, chunk) == ["received", "to-engine", "prompt", "codes", "audio"]


def test_a_stream_that_ends_without_either_is_not_kept() -> None:
    trails = begun(GenerateRequest(MARKED, gpu_frames=ALL_FRAMES))
    assert "prompt" in stages(trails, FrameChunk(NO_CODES, 1, FinishReason.STOP))
    assert stages(trails, FrameChunk(CODES, 1, None, b"12")) == []


def test_other_requests_are_left_alone() -> None:
    trails = begun(GenerateRequest(SynthesisRequest("r", "Hello.")))
    chunks = [(1, FrameChunk(CODES, 1))]
    assert trails.follow(chunks) is chunks


def test_a_request_that_fails_or_is_given_up_is_forgotten() -> None:
    trails = Trails()
    with pytest.raises(ValueError, match="no"), trails.begin(1, GenerateRequest(MARKED)):
        raise ValueError("no")
    assert stages(trails, FrameChunk(CODES, 1)) == []
    with trails.begin(1, GenerateRequest(MARKED)):
        pass
    trails.end(1)
    assert stages(trails, FrameChunk(CODES, 1)) == []
