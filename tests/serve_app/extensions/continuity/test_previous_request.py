"""`previous_request_id`: a request goes on in the voice of an earlier one of the same caller."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deployments.errors import Overloaded
from deployments.protocol import FinishReason
from serve_app.api.responses import speech_response
from serve_app.cli.key_file import create_key
from serve_app.config import AccessSettings, ApiSettings
from serve_app.extensions.continuity.tails import ContinuitySettings
from tests.serve_app import asgi
from tests.serve_app.extensions.client import Socket, talking
from tests.serve_app.fake import FakeSynthesizer, chunk, utterance
from tests.serve_app.one_model import client_of, one_api
from tools.suites.rows import SOCKETS, here

pytestmark = pytest.mark.anyio

SPEECH = "/v1/audio/speech"
ELEVEN = "/v1/text-to-speech/alloy"
NO_TAIL = "no recent finished request with this voice has this ID"


def surface(synthesizer: FakeSynthesizer, file: Path | None = None, *, joints: bool = False) -> FastAPI:
    settings = ApiSettings(access=AccessSettings(keys_file=file), continuity=ContinuitySettings(joints=joints))
    return one_api(synthesizer, settings)


async def post(api: FastAPI, path: str = SPEECH, *, key: str = "", **fields: object) -> httpx.Response:
    body = (
        {"input": "Hello there.", "voice": "ryan", "response_format": "pcm"} if path == SPEECH else {"text": "Hello."}
    )
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with client_of(api) as client:
        answer = await client.post(path, json=body | fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.fixture
def synthesizer() -> FakeSynthesizer:
    return FakeSynthesizer(script=utterance(12))


async def test_a_request_goes_on_from_an_earlier_one(synthesizer: FakeSynthesizer) -> None:
    api = surface(synthesizer)
    answer = await post(api)
    for _ in range(2):
        answer = await post(api, previous_request_id=answer.headers["x-request-id"])
        assert "x-ignored" not in answer.headers
    tails = [request.tail for request in synthesizer.requests]
    assert tails[0] is None
    assert [tail and (tail.text, len(tail.codes)) for tail in tails[1:]] == [("Hello there. ", 12)] * 2


@pytest.mark.parametrize("is_sent", [True, False])
async def test_an_answer_that_is_made_again_keeps_its_tail(monkeypatch: pytest.MonkeyPatch, *, is_sent: bool) -> None:
    synthesizer = FakeSynthesizer(script=utterance(12))
    api = surface(synthesizer)
    first = await post(api)
    collected, num_bodies = speech_response.read_all, 0

    async def counted(*asked: Any, **beside: int) -> bytes:
        nonlocal num_bodies
        content, num_bodies = await collected(*asked, **beside), num_bodies + 1
        synthesizer.script = utterance(12)
        if num_bodies == 2 and not is_sent:
            raise Overloaded("no room for a second draw", 1.0)
        return content

    monkeypatch.setattr(speech_response, "read_all", counted)
    synthesizer.script = [*utterance(12)[:3], chunk(b"", frames=0, finish_reason=FinishReason.EARLY)]
    second = await post(api, previous_request_id=first.headers["x-request-id"], stream=False)
    third = await post(api, previous_request_id=second.headers["x-request-id"])
    tails = [request.tail for request in synthesizer.requests]
    assert len(tails) == 4
    assert tails[1] is not None
    assert tails[2] is tails[1]
    assert ("x-ignored" not in third.headers) is (tails[3] is not None) is is_sent


async def test_ids_of_another_caller_are_as_unknown(synthesizer: FakeSynthesizer, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    ada, bob = create_key(file, "ada"), create_key(file, "bob")
    api = surface(synthesizer, file)
    first = await post(api, key=ada)
    foreign = await post(api, key=bob, previous_request_id=first.headers["x-request-id"])
    assert foreign.headers["x-ignored"] == f"previous_request_id ({NO_TAIL})"
    own = await post(api, key=ada, previous_request_id=first.headers["x-request-id"])
    assert "x-ignored" not in own.headers
    assert [request.tail is None for request in synthesizer.requests] == [True, True, False]


@pytest.mark.parametrize("joints", [False, True])
async def test_segments_are_joined_only_where_a_setting_says_so(synthesizer: FakeSynthesizer, *, joints: bool) -> None:
    api = surface(synthesizer, joints=joints)
    text = "A sentence of some thirty letters. " * 3
    first = await post(api, input=text, max_segment_chars=50)
    await post(api, input=text, max_segment_chars=50, previous_request_id=first.headers["x-request-id"])
    joined = [request.tail is not None for request in synthesizer.requests]
    assert joined == [False, joints, joints, True, joints, joints]


async def test_of_elevenlabs_ids_the_last_one_counts_and_text_alone_does_not(synthesizer: FakeSynthesizer) -> None:
    api = surface(synthesizer)
    first = await post(api, ELEVEN)
    second = await post(
        api, ELEVEN, previous_request_ids=["x", first.headers["request-id"]], previous_text="Hi.", next_text="Bye."
    )
    reason = "needs its audio: over HTTP use previous_request_ids"
    assert second.headers["x-ignored"] == f"previous_text ({reason}); next_text ({reason})"
    assert [request.tail is None for request in synthesizer.requests] == [True, False]
    third = await post(api, ELEVEN, previous_request_ids=[first.headers["request-id"], "x"])
    assert third.headers["x-ignored"] == f"previous_request_ids ({NO_TAIL})"
    fourth = await post(api, ELEVEN, previous_request_ids="x")
    assert fourth.headers["x-ignored"] == "previous_request_ids (must be a list of IDs in an HTTP body)"


@pytest.mark.parametrize("name", here("elevenlabs", "elevenlabs-text", "elevenlabs-dialogue"))
async def test_elevenlabs_sockets_name_them_in_a_query_and_in_messages(synthesizer: FakeSynthesizer, name: str) -> None:
    row = SOCKETS[name]
    query = "&previous_text=Hi.&next_text=Bye.&previous_request_ids=x"
    first, *others = row.speak("Hello there.")
    around = {"previous_text": "Hi.", "next_text": "Bye.", "previous_request_ids": ["x"]}
    async with talking(synthesizer, row.path + query) as client:
        client.send(first | around, *others)
        told, _ = await client.until(**row.ends_with)
    reason = "needs its audio: over HTTP use previous_request_ids"
    reasons = {"previous_text": reason, "next_text": reason}
    reasons["previous_request_ids"] = "must be a list of IDs in an HTTP body"
    ignored = {each["field"]: each["reason"] for message in told for each in message.get("ignored", ())}
    assert {field: ignored.get(field) for field in reasons} == reasons
    assert all(f"{field} ({why})" in client.headers["x-ignored"] for field, why in reasons.items())
    assert [request.tail for request in synthesizer.requests] == [None]


async def test_a_websocket_that_takes_none_names_it(synthesizer: FakeSynthesizer) -> None:
    path, protocols = "/v1/audio/speech/ws", ["nari.speech.v1"]
    async with asgi.websocket(surface(synthesizer), path, subprotocols=protocols) as connection:
        socket = await Socket(connection).accepted()
        assert (await socket.event())["type"] == "session.created"
        socket.send({"type": "request.start", "voice": "ryan", "previous_request_id": "x"})
        configured = await socket.event()
    assert configured["ignored"] == [
        {"field": "previous_request_id", "reason": "only for HTTP and Talkray's WebSocket"}
    ]
