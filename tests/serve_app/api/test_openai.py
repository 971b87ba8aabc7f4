"""Products and servers that follow OpenAI's API, each with the requests that it sends."""

import base64
import json

import httpx
import httpx2
import openai
import pytest
from openai import AsyncAzureOpenAI, AsyncOpenAI

from deployments.errors import Overloaded
from serve_app.config import ApiSettings
from tests.serve_app.audio.test_formats import decode
from tests.serve_app.fake import FakeSynthesizer, pcm_of, utterance
from tests.serve_app.one_model import one_api

pytestmark = pytest.mark.anyio

SPEECH = "/v1/audio/speech"
MP3 = "audio/mpeg"


async def test_azures_client_with_a_deployment_of_any_name(synthesizer: FakeSynthesizer) -> None:
    transport = httpx2.ASGITransport(one_api(synthesizer, ApiSettings()))
    async with AsyncAzureOpenAI(
        api_key="any",
        azure_endpoint="http://talkray",
        api_version="2025-04-01-preview",
        http_client=httpx2.AsyncClient(transport=transport),
    ) as client:
        answer = await client.audio.speech.create(model="my-tts", input="Hello", voice="alloy", response_format="pcm")
    assert answer.content == pcm_of(utterance())
    assert str(answer.response.url) == (
        "http://talkray/openai/deployments/my-tts/audio/speech?api-version=2025-04-01-preview"
    )
    assert synthesizer.requests[0].voice == "vivian"


# What each product sends, from its source; the answer must be audio of this type.
HELLO: dict[str, object] = {"model": "tts-1", "input": "Hello.", "voice": "alloy"}
ASH = HELLO | {"voice": "ash"}
KEY = {"Authorization": "Bearer x"}
OF_SIMPLISMART = {"text": "Hello.", "language": "English", "speaker": "Aiden", "instruct": "Softly."}
OF_SIMPLISMART |= {"leading_silence": True}
PRODUCTS: dict[str, tuple[dict[str, object], dict[str, str], str]] = {
    # An administrator's JSON is merged into the body.
    "open-webui": ({**HELLO, "stream": False}, {}, MP3),
    "librechat": (HELLO, KEY, MP3),
    "sillytavern": ({**HELLO, "response_format": "mp3", "speed": 1}, {"Authorization": "Bearer "}, MP3),
    "dify": ({**ASH, "model": "gpt-4o-mini-tts", "response_format": "mp3", "instruction": None}, {}, MP3),
    "home-assistant-openai_tts": ({**HELLO, "voice": "shimmer", "response_format": "mp3", "speed": 1.0}, KEY, MP3),
    "wyoming_openai": ({**HELLO, "voice": "nova", "response_format": "wav"}, {}, "audio/wav"),
    "simplismart": (OF_SIMPLISMART, {**KEY, "Accept": "audio/L16"}, "audio/L16;rate=24000;channels=1"),
    "kokoro-fastapi": ({**HELLO, "lang_code": "z", "stream": True}, {}, MP3),
}


@pytest.mark.parametrize("product", PRODUCTS)
async def test_a_product_is_answered(client: httpx.AsyncClient, synthesizer: FakeSynthesizer, product: str) -> None:
    body, headers, content_type = PRODUCTS[product]
    answer = await client.post(SPEECH, json=body, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (200, content_type)
    assert "x-ignored" not in answer.headers
    if content_type == MP3:
        assert decode(answer.content)[0].size > 0
    [request] = synthesizer.requests
    assert request.text == "Hello."
    assert request.instructions == body.get("instruct")
    if product == "simplismart":
        assert (request.voice, request.language) == ("aiden", "english")
    assert request.leading_silence == body.get("leading_silence", False)


async def test_dify_may_send_a_style(client: httpx.AsyncClient, synthesizer: FakeSynthesizer) -> None:
    await client.post(SPEECH, json={"input": "Hello.", "voice": "ash", "instruction": "Sad."})
    assert synthesizer.requests[0].instructions == "Sad."


async def test_wyoming_openai_takes_it_for_no_other_server(client: httpx.AsyncClient) -> None:
    """It probes for LocalAI, Speaches and Kokoro-FastAPI, whose voices mean something else."""
    assert (await client.get("/v1/readyz")).status_code == 404
    assert (await client.get("/v1/test")).status_code == 404
    assert (await client.get("/health")).text != "OK"


async def test_a_language_in_the_models_name(client: httpx.AsyncClient, synthesizer: FakeSynthesizer) -> None:
    answer = await client.post(SPEECH, json={"model": "tts-1-hd-zh", "input": "你好", "voice": "vivian"})
    assert (answer.status_code, synthesizer.requests[0].language) == (200, "chinese")


async def test_mistrals_form_is_json(client: httpx.AsyncClient, synthesizer: FakeSynthesizer) -> None:
    body = {"input": "Hello.", "model": "voxtral-mini-tts", "voice_id": "ryan", "response_format": "pcm"}
    accept = {"Accept": "application/json;q=1, text/event-stream;q=0"}
    answer = await client.post(SPEECH, json={**body, "stream": False}, headers=accept)
    assert answer.headers["content-type"] == "application/json"
    assert "model" in answer.headers["x-ignored"]
    assert base64.b64decode(answer.json()["audio_data"]) == pcm_of(utterance())
    assert synthesizer.requests[0].voice == "ryan"
    streamed = await client.post(SPEECH, json={**body, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    audio = b"".join(base64.b64decode(event["audio_data"]) for event in events[:-1])
    assert audio == pcm_of(utterance())
    usage = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    assert events[-1] == {"type": "speech.audio.done", "finish_reason": "stop", "usage": usage}


def client_for(synthesizer: FakeSynthesizer) -> AsyncOpenAI:
    http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(one_api(synthesizer, ApiSettings())))
    return AsyncOpenAI(api_key="any", base_url="http://talkray/v1", max_retries=0, http_client=http_client)


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
