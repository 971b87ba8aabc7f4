import base64
import json
from functools import partial

import httpx
import pytest

from deployments.errors import Overloaded
from serve_app.extensions.live.session import MAX_UNSPOKEN_CHARS
from tests.serve_app.audio.test_formats import decode
from tests.serve_app.extensions.client import Json, heard, talking
from tests.serve_app.fake import FakeSynthesizer, pcm_of, utterance

pytestmark = pytest.mark.anyio

PATH = "/api-ws/v1/realtime?model=qwen3-tts-flash-realtime"
REST = "/api/v1/services/aigc/multimodal-generation/generation"
COMMIT, CLEAR = {"type": "input_text_buffer.commit"}, {"type": "input_text_buffer.clear"}
FINISH = {"type": "session.finish"}


def update(**session: object) -> Json:
    """As the SDK sends it."""
    usual = {"voice": "Cherry", "mode": "server_commit", "response_format": "pcm", "sample_rate": 24000}
    return {"event_id": "event_1", "type": "session.update", "session": {**usual, **session}}


def append(text: str) -> Json:
    return {"type": "input_text_buffer.append", "text": text}


def audio_of(messages: list[Json]) -> bytes:
    return b"".join(base64.b64decode(each["delta"]) for each in messages if each.get("type") == "response.audio.delta")


created = partial(talking, greeting="session.created")


async def test_words_are_spoken_as_they_come(synthesizer: FakeSynthesizer) -> None:
    async with created(synthesizer, PATH) as client:
        assert client.greeting["session"]["id"]
        client.send(update(), append("Hello "), append("there."), FINISH)
        messages, _ = await client.until(closed=1000)
        await client.connection.task
    kinds = list(dict.fromkeys(message.get("type") for message in messages))
    assert kinds[0] == "session.updated"
    assert kinds[1:4] == [f"response.{each}" for each in ("created", "output_item.added", "content_part.added")]
    assert kinds[-3:] == ["response.done", "session.finished", None]
    assert audio_of(messages) == pcm_of(utterance())
    assert messages[-3]["response"]["usage"]["characters"] == len("Hello there.")
    assert synthesizer.texts == ["Hello there."]
    assert synthesizer.requests[0].voice == "serena"  # for a voice of theirs


async def test_a_response_for_each_commit(synthesizer: FakeSynthesizer) -> None:
    async with created(synthesizer, PATH) as client:
        client.send(update(mode="commit", response_format="wav", speech_rate=1.0), append("Void."), CLEAR)
        await client.until(type="input_text_buffer.cleared")
        for text in ("One.", "Two."):
            client.send(append(text), COMMIT)
            messages, _ = await client.until(type="response.done")
            assert messages[0]["type"] == "input_text_buffer.committed"
            assert audio_of(messages)[:4] == b"RIFF"  # each response is a file
            assert audio_of(messages)[44:] == pcm_of(utterance())
        client.send(append("Three."), FINISH)
        messages, _ = await client.until(type="session.finished")
        assert audio_of(messages)[44:] == pcm_of(utterance())
    assert synthesizer.texts == ["One.", "Two.", "Three."]


async def test_one_text_over_http(client: httpx.AsyncClient, synthesizer: FakeSynthesizer) -> None:
    body = {"model": "qwen3-tts-flash", "input": {"text": "Hello.", "voice": "ryan", "language_type": "German"}}
    answer = (await client.post(REST, json=body)).json()
    audio = answer["output"]["audio"]
    assert (audio["url"], answer["output"]["finish_reason"]) == ("", "stop")
    assert decode(base64.b64decode(audio["data"]))[0].size == len(pcm_of(utterance())) // 2
    assert answer["usage"] == {"characters": 6, "input_tokens": 7, "output_tokens": 4, "total_tokens": 11}
    [request] = synthesizer.requests
    assert (request.language, request.voice, request.request_id) == ("german", "ryan", answer["request_id"])


async def test_one_text_as_events(client: httpx.AsyncClient) -> None:
    body = {"model": "qwen3-tts-flash", "input": {"text": "Hello.", "voice": "Cherry"}, "parameters": {}}
    answer = await client.post(REST, json=body, headers={"X-DashScope-SSE": "enable"})
    assert answer.headers["content-type"] == "text/event-stream"
    told = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]
    audio = b"".join(base64.b64decode(each["output"]["audio"]["data"]) for each in told)
    assert audio == pcm_of(utterance())
    assert told[-1]["output"]["finish_reason"] == "stop"


async def test_a_body_without_text_is_refused(client: httpx.AsyncClient) -> None:
    for body in ({}, {"input": "Hello"}, {"input": {"text": None}}):
        assert (await client.post(REST, json=body)).status_code == 400


@pytest.mark.parametrize("bit_rate", [-1, 0, 2**70, True])
async def test_a_bit_rate_that_no_encoder_has_is_refused(client: httpx.AsyncClient, bit_rate: int) -> None:
    asked = {"text": "Hello.", "voice": "ryan", "response_format": "mp3", "bit_rate": bit_rate}
    answer = await client.post(REST, json={"model": "qwen3-tts-flash", "input": asked})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bit_rate")


async def test_messages_that_come_as_the_server_closes_are_no_failure() -> None:
    async with created(FakeSynthesizer(script=[Overloaded("full", 2.0)]), PATH) as client:
        client.send(update(mode="commit"), append("Hello"), COMMIT)
        client.send(*[CLEAR] * 20)
        await client.until(closed=1013)
        client.send(*[CLEAR] * 20)
        await client.connection.task


async def test_settings_without_effect_are_named_with_the_update_and_not_kept(synthesizer: FakeSynthesizer) -> None:
    sent = (update(enable_tn=True, nonsense="x"), update(), append("Hello."), FINISH)
    _, first, second, *messages = (await heard(synthesizer, PATH, *sent, until={"closed": 1000}))[0]
    assert {entry["field"] for entry in first["ignored"]} == {"voice", "model", "enable_tn", "nonsense"}
    assert {entry["field"] for entry in second["ignored"]} == {"voice", "model", "enable_tn"}  # no language is known
    assert "nonsense" not in first["session"]
    assert all("ignored" not in message for message in messages)


async def test_without_an_update_the_first_response_names_them(synthesizer: FakeSynthesizer) -> None:
    messages, _ = await heard(synthesizer, PATH, append("Hello."), FINISH, until={"closed": 1000})
    begun = next(message for message in messages if message.get("type") == "response.created")
    assert [entry["field"] for entry in begun["ignored"]] == ["model"]


async def test_what_waits_for_a_commit_is_bounded(synthesizer: FakeSynthesizer) -> None:
    async with created(synthesizer, PATH) as client:
        client.send(update(mode="commit"), append("x" * MAX_UNSPOKEN_CHARS), append("y"))
        (*_, error), _ = await client.until(type="error")
        assert (error["error"]["code"], error["error"]["param"]) == ("string_above_max_length", "text")
        client.send(CLEAR, append("Hello."), COMMIT, FINISH)
        await client.until(closed=1000)
        await client.connection.task
    assert synthesizer.texts == ["Hello."]
