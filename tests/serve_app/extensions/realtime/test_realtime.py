import base64
from functools import partial

import pytest

from deployments.errors import Overloaded
from serve_app.extensions.live.session import MAX_UNSPOKEN_CHARS
from tests.serve_app.extensions.client import Json, heard, talking
from tests.serve_app.fake import FakeSynthesizer, pcm_of, utterance
from tools.suites.rows.realtime import item

pytestmark = pytest.mark.anyio

PATH = "/v1/realtime?model=gpt-realtime-2.1-mini"
RENDERER = "You are a text-to-speech renderer. Read the text aloud."


def update(voice: str = "ash", **output: object) -> Json:
    """As Open WebUI sends it."""
    output |= {"format": {"type": "audio/pcm", "rate": 24000}, "voice": voice}
    audio = {"input": {"turn_detection": None}, "output": output}
    session = {"type": "realtime", "output_modalities": ["audio"], "audio": audio, "instructions": RENDERER}
    return {"type": "session.update", "session": session}


def create(text: str) -> Json:
    asked = {"conversation": "none", "output_modalities": ["audio"], "instructions": RENDERER}
    return {"type": "response.create", "response": {**asked, "input": [item(text)]}}


def audio_of(messages: list[Json]) -> bytes:
    deltas = (message for message in messages if message["type"] == "response.output_audio.delta")
    return b"".join(base64.b64decode(message["delta"], validate=True) for message in deltas)


created = partial(talking, greeting="session.created")


async def test_open_webuis_sequence(synthesizer: FakeSynthesizer) -> None:
    async with created(synthesizer, PATH, headers={"authorization": "Bearer x"}) as client:
        client.send(update())
        await client.until(type="session.updated")
        client.send(create("Hello there."))
        messages, _ = await client.until(type="response.done")
    assert messages[0]["type"] == "response.created"
    response_id = messages[0]["response"]["id"]
    deltas = [message for message in messages if message["type"] == "response.output_audio.delta"]
    assert {message["response_id"] for message in deltas} == {response_id}
    assert audio_of(messages) == pcm_of(utterance())
    done = messages[-1]["response"]
    assert (done["id"], done["status"]) == (response_id, "completed")
    assert done["usage"] == {"input_tokens": 7, "output_tokens": 4, "total_tokens": 11, "characters": 12}
    assert len({message["event_id"] for message in messages}) == len(messages)
    [request] = synthesizer.requests
    assert (request.text, request.voice, request.instructions) == ("Hello there.", "ryan", None)


async def test_items_of_a_conversation_are_spoken_once(synthesizer: FakeSynthesizer) -> None:
    async with created(synthesizer, PATH) as client:
        for text in ("x" * MAX_UNSPOKEN_CHARS, "y"):
            client.send({"type": "conversation.item.create", "item": item(text)})
        (*added, error), _ = await client.until(type="error")
        assert (len(added), error["error"]["code"]) == (2, "string_above_max_length")
        client.send({"type": "conversation.item.create", "item": item("Hello.")}, {"type": "response.create"})
        await client.until(type="conversation.item.done")
        await client.until(type="response.done")
        client.send({"type": "response.create", "event_id": "mine"})
        (error,), _ = await client.until(type="error")
        assert (error["error"]["param"], error["error"]["event_id"]) == ("response.input", "mine")
    assert synthesizer.texts == ["Hello."]


async def test_telephone_formats_of_both_shapes() -> None:
    for session in (
        {"audio": {"output": {"format": {"type": "audio/pcmu"}}}},
        {"output_audio_format": "g711_ulaw", "voice": {"id": "ryan"}},
    ):
        async with created(FakeSynthesizer(script=utterance(12)), "/openai/realtime?deployment=any") as client:
            client.send({"type": "session.update", "session": session}, create("Hello"))
            messages, _ = await client.until(type="response.done")
            assert len(audio_of(messages)) == pytest.approx(12 * 0.08 * 8000, abs=40)


async def test_a_failure_is_an_error_and_ends_its_response() -> None:
    full = FakeSynthesizer(script=[Overloaded("full", 2.0)])
    (*_, error, done), _ = await heard(full, PATH, create("Hello"), until={"type": "response.done"})
    assert (error["error"]["code"], done["response"]["status"]) == ("rate_limit_exceeded", "failed")


async def test_what_has_no_effect_is_named_where_it_was_sent(synthesizer: FakeSynthesizer) -> None:
    async with created(synthesizer, PATH) as client:
        client.send(update(), {"type": "session.update", "session": {"speed": 1.5, "turn_detection": None}})
        (updated,), _ = await client.until(type="session.updated")
        assert {entry["field"] for entry in updated["ignored"]} == {"instructions", "model"}
        (again,), _ = await client.until(type="session.updated")
        assert [entry["field"] for entry in again["ignored"]] == ["model"]
        client.send({"type": "session.update", "session": {"speed": 9}})
        (error,), _ = await client.until(type="error")
        assert error["error"]["param"] == "speed"
        client.send(create("Hello."))
        messages, _ = await client.until(type="response.done")
    assert {entry["field"] for entry in messages[0]["ignored"]} == {"instructions", "model"}
    assert messages[-1]["response"]["status"] == "completed"
