"""OpenAI's own client against the API, without a network."""

import json

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from deployments.errors import Overloaded
from serve_app.config import ApiSettings
from tests.serve_app.audio.test_formats import decode
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, pcm_of, utterance
from tests.serve_app.one_model import one_api

pytestmark = pytest.mark.anyio


def client_for(synthesizer: FakeSynthesizer, *, max_retries: int = 0) -> AsyncOpenAI:
    transport = httpx2.ASGITransport(one_api(synthesizer, ApiSettings()))
    return AsyncOpenAI(
        api_key="any",
        base_url="http://talkray/v1",
        max_retries=max_retries,
        http_client=httpx2.AsyncClient(transport=transport),
    )


async def test_create() -> None:
    async with client_for(FakeSynthesizer(script=utterance())) as client:
        response = await client.audio.speech.create(model="tts-1", input="Hello", voice="alloy")
    samples, rate = decode(response.content)
    assert samples.size / rate >= 4 * CUSTOM_VOICE.frame_samples / CUSTOM_VOICE.sample_rate


async def test_create_with_streaming_response() -> None:
    synthesizer = FakeSynthesizer(script=utterance())
    async with (
        client_for(synthesizer) as client,
        client.audio.speech.with_streaming_response.create(
            model="gpt-4o-mini-tts",
            input="Hello",
            voice={"id": "verse"},
            response_format="pcm",
            extra_body={"language": "German", "seed": 5},
        ) as response,
    ):
        assert b"".join([part async for part in response.iter_bytes(1000)]) == pcm_of(utterance())
        assert response.request_id == synthesizer.requests[0].request_id
    [request] = synthesizer.requests
    assert (request.language, request.seed) == ("german", 5)


async def test_events() -> None:
    async with (
        client_for(FakeSynthesizer(script=utterance())) as client,
        client.audio.speech.with_streaming_response.create(
            model="gpt-4o-mini-tts", input="Hello", voice="ash", stream_format="sse"
        ) as response,
    ):
        lines = [line async for line in response.iter_lines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["type"] == "speech.audio.done"


async def test_errors_become_typed_exceptions() -> None:
    async with client_for(FakeSynthesizer(script=[Overloaded("full")])) as client:
        with pytest.raises(openai.RateLimitError) as limited:
            await client.audio.speech.create(model="tts-1", input="Hello", voice="alloy")
        assert limited.value.code == "rate_limit_exceeded"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.audio.speech.create(model="tts-1", input="Hello", voice="nobody")
        assert (refused.value.param, refused.value.code) == ("voice", "voice_not_found")
        with pytest.raises(openai.NotFoundError):
            await client.audio.speech.create(model="other", input="Hello", voice="alloy")


async def test_models() -> None:
    async with client_for(FakeSynthesizer()) as client:
        listed = [model.id async for model in client.models.list()]
        assert listed[0] == CUSTOM_VOICE.name
        assert (await client.models.retrieve(CUSTOM_VOICE.name)).id == CUSTOM_VOICE.name
