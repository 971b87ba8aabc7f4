import io

import aiohttp
import av
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from tests.e2e.speech import Pools, body, fetch, samples

pytestmark = pytest.mark.anyio

FRAMES = 25
SECONDS = 25 * 0.08


@pytest.fixture
async def client(server: str, pools: Pools) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="any", max_retries=0)


def spoken(**fields: object) -> dict[str, object]:
    return body(seed=3, ignore_eos=True, leading_silence=True, max_new_tokens=FRAMES + 1, **fields)


def decode(content: bytes) -> tuple[NDArray[np.int32], int]:
    """Samples at 16 bit scale, and their rate, of a file of any container."""
    resampler = av.AudioResampler(format="s16", layout="mono")
    with av.open(io.BytesIO(content)) as container:
        frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
        rate = container.streams.audio[0].rate
    return np.concatenate([frame.to_ndarray()[0] for frame in frames]).astype(np.int32), rate


def duration(content: bytes) -> float:
    """Seconds of audio."""
    decoded, rate = decode(content)
    return len(decoded) / rate


@pytest.mark.parametrize("audio_format", ["mp3", "opus", "aac", "flac", "wav"])
@pytest.mark.parametrize("stream", [True, False])
async def test_every_format_has_the_right_length(http: aiohttp.ClientSession, audio_format: str, stream: bool) -> None:
    content = await fetch(http, spoken(response_format=audio_format, stream=stream))
    assert duration(content) == pytest.approx(SECONDS, abs=0.12)  # lossy encoders pad to whole frames


async def test_lossless_formats_hold_the_samples(http: aiohttp.ClientSession) -> None:
    pcm = samples(await fetch(http, spoken()))
    for audio_format in ("wav", "flac"):
        decoded, rate = decode(await fetch(http, spoken(response_format=audio_format)))
        assert len(decoded) == len(pcm) == round(SECONDS * rate)
        assert np.abs(decoded - pcm).max() <= 1


async def test_openai_streaming_response(client: openai.AsyncOpenAI) -> None:
    fields = {"seed": 3, "ignore_eos": True, "max_new_tokens": FRAMES + 1, "leading_silence": True}
    async with (
        client,
        client.audio.speech.with_streaming_response.create(
            model="gpt-4o-mini-tts", input="Hello.", voice="verse", response_format="pcm", extra_body=fields
        ) as answer,
    ):
        parts = [part async for part in answer.iter_bytes()]
    assert len(parts) > 1
    assert len(b"".join(parts)) == round(2 * SECONDS * 24000)
