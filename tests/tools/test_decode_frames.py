import io
import wave
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from deployments.codec.backends.registry import load_decoder
from deployments.codec.pool.service import CodecService
from deployments.protocol import ModelInfo, PcmChunk, SynthesisRequest
from serve_app.config import ApiSettings
from talkray_tools.decode_frames import BadFrames, decode, main, read_header
from tests.deployments.codec.pool.test_service import Talker, make_service, random_codes
from tests.serve_app.fake import CUSTOM_VOICE
from tests.serve_app.one_model import one_api

pytestmark = pytest.mark.anyio


class Spoken:
    """The codec of a checkpoint behind a talker that says the same codes again and again."""

    def __init__(self, service: CodecService, info: ModelInfo) -> None:
        self._info, self._service, self._talker = info, service, Talker(random_codes(5, frames=30))

    async def describe(self) -> ModelInfo:
        return self._info

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        return self._service.decode_stream(request, self._talker.generate)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("CustomVoice")


@pytest.fixture(scope="module")
def service(model: Path) -> CodecService:
    return make_service(model)


@pytest.mark.parametrize("silence", [False, True])
@pytest.mark.parametrize("text", ["Hello there.", "One two three four. Five six seven eight."])
async def test_samples_agree(model: Path, service: CodecService, tmp_path: Path, text: str, silence: bool) -> None:
    spoken = Spoken(service, replace(CUSTOM_VOICE, max_segment_chars=25))
    transport = httpx.ASGITransport(one_api(spoken, ApiSettings()))
    asked = {"input": text, "voice": "alloy", "seed": 3, "leading_silence": silence}
    async with httpx.AsyncClient(transport=transport, base_url="http://talkray") as client:
        frames = (await client.post("/v1/audio/frames", json=asked)).content
        pcm = (await client.post("/v1/audio/speech", json={**asked, "response_format": "pcm"})).content
    (tmp_path / "a.frames").write_bytes(frames)
    main([str(tmp_path / "a.frames"), str(tmp_path / "a.wav"), "--model", str(model)])
    with wave.open(str(tmp_path / "a.wav")) as decoded:
        assert decoded.getframerate() == CUSTOM_VOICE.sample_rate
        ours = np.frombuffer(decoded.readframes(decoded.getnframes()), "<i2").astype(int)
    theirs = np.frombuffer(pcm, "<i2").astype(int)
    assert theirs.size >= 29 * CUSTOM_VOICE.frame_samples
    assert ours.size == theirs.size
    assert np.abs(ours - theirs).max() <= 1


async def test_what_is_no_stream_of_frames_is_told(model: Path) -> None:
    decoder = load_decoder(model / "speech_tokenizer")
    with pytest.raises(BadFrames, match="version 1"):
        read_header(io.BytesIO(b"RIFF" + bytes(12)), decoder)
    with pytest.raises(BadFrames, match="ends in the middle"):
        list(decode(io.BytesIO(b"f\0\0\0\1\0\0\0"), decoder))
    with pytest.raises(BadFrames, match="only 0 are decoded"):
        list(decode(io.BytesIO(b"p\0\0\0\1\0\0\0"), decoder))
    with pytest.raises(BadFrames, match="kind 120"):
        list(decode(io.BytesIO(b"x\0\0\0\1\0\0\0"), decoder))
