"""What every dialect promises, over all sockets and all `POST`s. Their wire forms have tests of their own."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import compile_path
from starlette.types import Message

from deployments.errors import Overloaded, ReplicaLost
from serve_app.api.error_replies import translate
from serve_app.config import AdmissionSettings, ApiSettings
from serve_app.extensions import BUILT_IN
from serve_app.extensions.live import connection as sockets
from serve_app.extensions.live.live_text import LiveTexts
from serve_app.speech.speech_models import SpeechModels
from tests.serve_app import asgi
from tests.serve_app.extensions.client import Client, Json, audio_in, connect
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, Step, chunk, pcm_of, tone, utterance
from tests.serve_app.one_model import client_for, one_api, posted
from tools.suites.row import VOICE, PostRow, SocketRow
from tools.suites.rows import DIALECTS, ISSUING, POSTS, SOCKETS, STORING

pytestmark = pytest.mark.anyio

FRAME = tone(CUSTOM_VOICE.frame_samples)
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e400", "9" * 5000, "9" * 400]
MARKED = "<think>Hm.</think>**Hello** \U0001f600 [there](http://x.y)!"
TAGGED = '<emotion value="sad"/>One. <expr type="expression" label="calm"/>Two. [excited] Three.'
STYLED = [("sad", "One."), ("calm", "Two."), ("excited", "Three.")]
TAGS = ("tag emotion", "tag expr", "direction in brackets")
LEFT_OUT = ("reasoning of a language model", "marks of Markdown", "link target", "emoji")
PARTS = ["So \ud842", "\udfb7 it \ud83d is"]  # a pair of surrogates that is cut, and half a pair

socket_rows = pytest.mark.parametrize("row", SOCKETS.values(), ids=SOCKETS)
post_rows = pytest.mark.parametrize("row", POSTS.values(), ids=POSTS)


def test_no_route_is_hidden_by_one_before_it() -> None:
    routes = [route for dialect in DIALECTS for route in dialect.routes if route.json_field is None]
    places = [route.operation.split() for route in sorted(routes, key=lambda route: route.operation.count("{"))]
    hidden = [
        (method, path, before)
        for number, (method, path) in enumerate(places)
        for other, before in places[:number]
        if other == method and compile_path(before)[0].match(path)
    ]
    assert not hidden


def test_each_path_has_a_row() -> None:
    sockets_of = [(path, kind.subprotocol) for dialect in DIALECTS for path, kind in dialect.sockets]
    places = [(row.path.partition("?")[0], *(row.sample.protocols or (None,))) for row in SOCKETS.values()]
    operations = [route.operation for dialect in DIALECTS for route in dialect.routes]
    posts = [each.removeprefix("POST ") for each in operations if each.startswith("POST ")]
    paths = [*(row.path.partition("?")[0] for row in POSTS.values()), *ISSUING]
    absent = {path for path, protocol in sockets_of if not _is_among(path, [p for p, own in places if own == protocol])}
    rows = f"add rows to tools/suites/rows/{{{','.join(BUILT_IN)}}}.py"
    assert absent == {alias for row in SOCKETS.values() for alias in row.aliases}, f"sockets: {rows}"
    assert {path for path in posts if not _is_among(path, paths)} == {*STORING}, f"posts, or storing: {rows}"


def _is_among(template: str, paths: list[str]) -> bool:
    pattern = compile_path(template)[0]
    return any(pattern.match(path) for path in paths)


@asynccontextmanager
async def connected(row: SocketRow, synthesizer: FakeSynthesizer) -> AsyncIterator[Client]:
    async with connect(synthesizer, row.path, subprotocols=row.sample.protocols) as connection:
        yield await Client(connection).accepted()


async def until(client: Client, told: Json) -> tuple[list[Json], bytes]:
    """All messages and all audio up to the message with the first of these fields, which has the others too."""
    kind = next(iter(told))
    messages, audio = await client.until(**{kind: told[kind]})
    assert has(messages[-1], told), messages[-1]
    return messages, audio + b"".join(audio_in(message) for message in messages)


async def spoken(client: Client, row: SocketRow) -> tuple[list[Json], bytes]:
    """All messages and all audio up to the end of an utterance."""
    return await until(client, row.ends_with)


async def first_audio(client: Client) -> bytes:
    while not (audio := message if isinstance(message := await client.next(), bytes) else audio_in(message)):
        pass
    return audio


def has(told: object, fields: object) -> bool:
    if not isinstance(fields, dict):
        return told == fields
    return isinstance(told, dict) and all(name in told and has(told[name], fields[name]) for name in fields)


async def refusal(client: Client, row: SocketRow, *, is_bad: bool = False) -> Json:
    """The next message that says what is wrong: that speech failed, or that a message `is_bad`."""
    while True:
        message = await client.next()
        assert isinstance(message, bytes) or "closed" not in message, f"closed, instead of an error: {message}"
        if isinstance(message, dict) and is_refusal(row, message):
            assert has(message, row.invalid_reply) if is_bad else message.get("type") == row.failure_type, message
            return message


def is_refusal(row: SocketRow, message: Json) -> bool:
    kinds = {row.failure_type, row.invalid_reply.get("type")} - {None}
    return bool(message.get("error")) or message.get("type") in kinds


def code_of(told: Json) -> object:
    error = told.get("error")
    return error["code"] if isinstance(error, dict) else told.get("error_code", told.get("code"))


def is_heard(audio: bytes, pcm: bytes, row: SocketRow) -> bool:
    """Whether the audio is `pcm`, or, in a compressed format, whether there is any."""
    return audio == pcm if row.is_pcm else bool(audio)


@socket_rows
async def test_a_text_is_spoken_to_its_end(synthesizer: FakeSynthesizer, row: SocketRow) -> None:
    async with connected(row, synthesizer) as client:
        for again in (False, True) if row.closing.stays_open else (False,):
            client.send(*row.speak("Hello there.", again=again))
            _, audio = await spoken(client, row)
            assert is_heard(audio, pcm_of(utterance()), row)
    assert set(synthesizer.texts) == {"Hello there."}
    assert {request.voice for request in synthesizer.requests} <= {VOICE, "serena"}


@pytest.mark.parametrize("name", [name for name, row in SOCKETS.items() if row.stop])
async def test_what_is_cancelled_stops_at_once_and_nothing_of_it_follows(name: str) -> None:
    row = SOCKETS[name]
    assert row.stop is not None
    synthesizer = FakeSynthesizer(script=[chunk(FRAME), asyncio.Event()])
    async with connected(row, synthesizer) as client:
        client.send(*row.speak("A long story."))
        await synthesizer.waiting.wait()
        audio = await first_audio(client)
        assert is_heard(audio, FRAME, row)
        client.send(row.stop.message)
        if row.stop.answer is not None:
            _, audio = await until(client, row.stop.answer)
            assert audio == b""
        else:
            await synthesizer.closed.wait()
        assert synthesizer.closed.is_set()
        if not row.closing.stays_open:
            messages, audio = await client.until(closed=1000)
            assert {message.get("type") for message in messages} <= {None, row.closing.farewell}
            assert audio == b""
            return
        if "context_id" in row.stop.message:
            client.send({**row.stop.message, "context_id": "nowhere"})
        synthesizer.script = utterance()
        client.send(*row.speak("New.", again=True))
        messages, audio = await spoken(client, row)
        assert is_heard(audio, pcm_of(utterance()), row)
        assert "nowhere" not in str(messages)
        assert synthesizer.texts[-1] == "New."


@pytest.mark.parametrize("name", [name for name, row in SOCKETS.items() if row.busy])
async def test_an_utterance_is_refused_while_another_one_is_spoken(name: str) -> None:
    row, synthesizer = SOCKETS[name], FakeSynthesizer(script=[chunk(FRAME), asyncio.Event()])
    async with connected(row, synthesizer) as client:
        client.send(*row.speak("A long story."))
        await synthesizer.waiting.wait()
        client.send(*row.speak("Another.", again=True))
        assert code_of(await refusal(client, row, is_bad=True)) == row.busy
    assert len(synthesizer.requests) == 1


@socket_rows
async def test_a_bad_message_is_told_and_the_socket_stays(row: SocketRow) -> None:
    async with connected(row, FakeSynthesizer(script=utterance())) as client:
        for message, named in row.bad():
            client.send(message)
            assert _names(told := await refusal(client, row, is_bad=True), named), told
        for content, code in (
            ({"text": "{"}, "invalid_json"),
            ({"text": "[]"}, "invalid_json"),
            ({"bytes": b"{}"}, "invalid_json"),
            ({"text": json.dumps({"text": "x" * (128 << 10)})}, "payload_too_large"),
        ):
            client.connection.receive({"type": "websocket.receive", **content})
            told = await refusal(client, row, is_bad=True)
            assert code_of(told) == row.invalid_reply.get("code", code)
            assert _names(told, None)
        client.send(*row.speak("Hello."))
        _, audio = await spoken(client, row)
        assert is_heard(audio, pcm_of(utterance()), row)


def _names(told: Json, named: str | None) -> bool:
    """`named`: the field, or words of an answer that names none; None: no field."""
    error = told.get("error")
    if isinstance(error, dict):
        return bool(error["param"] == named)
    return named is None or named in told.get("message", told.get("description", error))


@socket_rows
async def test_a_number_of_a_message_is_told_and_the_socket_stays(row: SocketRow) -> None:
    assert row.numbers
    async with connected(row, FakeSynthesizer(script=utterance())) as client:
        for text, number in product(row.numbers, [*NUMBERS, NUMBERS[0]]):  # the last answer shows that none ended it
            client.connection.receive({"type": "websocket.receive", "text": text.replace("?", number)})
            assert "NaN" not in json.dumps(await refusal(client, row, is_bad=True)), number


LOST, SECRET, BEGUN = ReplicaLost("lost"), ValueError("secret"), chunk(FRAME)
FAILING: dict[str, list[Step]] = {
    "full": [Overloaded("full", 3.2)], "lost": [LOST], "internal": [SECRET],
    "lost behind audio": [BEGUN, LOST], "internal behind audio": [BEGUN, SECRET],
}  # fmt: skip


@socket_rows
@pytest.mark.parametrize("script", FAILING.values(), ids=FAILING)
async def test_a_failure_is_told(row: SocketRow, script: list[Step]) -> None:
    async with connected(row, FakeSynthesizer(script=script)) as client:
        client.send(*row.speak("Hello."))
        told, error = await refusal(client, row), script[-1]
        assert isinstance(error, Exception)
        assert code_of(told) == translate(error).code
        assert "secret" not in json.dumps(told)
        code = row.closing.full if isinstance(error, Overloaded) else row.closing.failed
        if code is None:
            client.send(row.bad()[0][0])
            await refusal(client, row, is_bad=True)
        else:
            await closes(client, row, code)


async def closes(client: Client, row: SocketRow, code: int) -> None:
    message = await client.connection.next()
    if message["type"] == "websocket.send":  # ElevenLabs' one text ends all the same
        assert json.loads(message["text"]) == row.ends_with
        message = await client.connection.next()
    assert (message["type"], message["code"]) == ("websocket.close", code)
    assert code != 1013 or message["reason"].startswith("overloaded, retry after 4 s: ")
    await client.connection.task


@socket_rows
async def test_the_last_message_names_what_is_left_out(synthesizer: FakeSynthesizer, row: SocketRow) -> None:
    async with connected(row, synthesizer) as client:
        client.send(*row.speak(MARKED))
        messages, _ = await spoken(client, row)
    assert set(synthesizer.texts) == {"Hello there!"}
    last = json.dumps(messages[-1])
    assert all(told in last for told in (*LEFT_OUT, "left_out"))


def styles_of(synthesizer: FakeSynthesizer) -> list[tuple[str | None, str]]:
    instructions = [request.instructions for request in synthesizer.requests]
    return list(zip(instructions, map(str.strip, synthesizer.texts), strict=True))


@socket_rows
async def test_a_tag_holds_to_the_next_one_wherever_it_is_cut(row: SocketRow) -> None:
    whole = [row.speak(TAGGED)]
    in_parts = [row.speak_in_parts(TAGGED[:at], TAGGED[at:]) for at in range(1, len(TAGGED), 9) if row.split_utterance]
    for messages in (*whole, *in_parts, *([row.speak_in_parts(*TAGGED)] if row.split_utterance else [])):
        synthesizer = FakeSynthesizer(script=utterance())
        async with connected(row, synthesizer) as client:
            client.send(*messages)
            last = (await spoken(client, row))[0][-1]
        assert styles_of(synthesizer) == STYLED
        assert not any(tag in json.dumps(last) for tag in TAGS)


@socket_rows
async def test_the_last_message_names_tags_without_effect(row: SocketRow) -> None:
    synthesizer = FakeSynthesizer(replace(CUSTOM_VOICE, supports_instructions=False), utterance())
    async with connected(row, synthesizer) as client:
        client.send(*row.speak(TAGGED))
        last = (await spoken(client, row))[0][-1]
    assert styles_of(synthesizer) == [(None, "One. Two. Three.")]
    assert all(tag in json.dumps(last) for tag in TAGS)


@socket_rows
@pytest.mark.parametrize("text", ["...", "</expr>"])
async def test_a_text_without_words_is_silence(synthesizer: FakeSynthesizer, row: SocketRow, text: str) -> None:
    async with connected(row, synthesizer) as client:
        client.send(*row.speak(text))
        _, audio = await spoken(client, row)
    assert synthesizer.requests == []
    assert audio
    assert not row.is_pcm or not any(audio)


@socket_rows
async def test_a_model_that_is_not_there_is_told(row: SocketRow) -> None:
    async with connect(FakeSynthesizer(None), row.path, subprotocols=row.sample.protocols) as connection:
        first = await connection.next()
        if first["type"] == "websocket.http.response.start":
            assert first["status"] == 503
            return
        client = Client(connection)
        client.send(*row.speak("Hello."))
        assert code_of(await refusal(client, row)) == "not_ready"


@socket_rows
@pytest.mark.parametrize("begun", [[], [chunk(FRAME)]], ids=["at once", "behind audio"])
async def test_who_leaves_frees_its_place(row: SocketRow, begun: list[Step]) -> None:
    synthesizer, texts = FakeSynthesizer(script=[*begun, asyncio.Event()]), LiveTexts()
    settings = ApiSettings(admission=AdmissionSettings(client_streams=1))
    api = one_api(synthesizer, settings, opened={"live": texts})
    async with _of_api(api, row) as first:
        client = await Client(first).accepted()
        client.send(*row.speak("A long story."))
        await synthesizer.waiting.wait()
        async with _of_api(api, row) as second:
            assert (await second.next())["type"] == "websocket.accept"
            closed = await second.next()
            assert (closed["type"], closed["code"]) == ("websocket.close", 1013)
            assert "retry after" in closed["reason"]
        client.leave()
        await first.task
        assert synthesizer.closed.is_set()
    synthesizer.script = utterance()
    async with _of_api(api, row) as third:
        client = await Client(third).accepted()
        client.send(*row.speak("Hello."))
        await spoken(client, row)
    await texts.aclose()


def _of_api(api: FastAPI, row: SocketRow) -> asgi.Connection:
    return asgi.websocket(api, row.path, subprotocols=row.sample.protocols)


@pytest.mark.parametrize("name", [name for name, row in SOCKETS.items() if row.closing.drain])
async def test_who_leaves_while_it_drains_is_not_spoken_to(name: str) -> None:
    row = SOCKETS[name]
    assert row.closing.drain is not None
    synthesizer = FakeSynthesizer(script=[chunk(FRAME), asyncio.Event()])
    async with connected(row, synthesizer) as client:
        client.send(*row.speak("Good bye."), row.closing.drain)
        await synthesizer.waiting.wait()
        client.leave()
        await client.connection.task
        assert synthesizer.closed.is_set()


@socket_rows
async def test_an_idle_socket_is_closed(row: SocketRow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "IDLE_TIMEOUT_S", 0.01)
    async with connected(row, FakeSynthesizer()) as client:
        while (message := await client.connection.next())["type"] == "websocket.send":
            pass
        assert message == {"type": "websocket.close", "code": 1000, "reason": "idle"}
        await client.connection.task


@pytest.mark.parametrize("name", [name for name, row in SOCKETS.items() if row.split_utterance])
async def test_halves_of_a_character_meet_in_the_next_message(synthesizer: FakeSynthesizer, name: str) -> None:
    row = SOCKETS[name]
    async with connected(row, synthesizer) as client:
        client.send(*row.speak_in_parts(*PARTS))  # `json.dumps` writes halves as JavaScript does
        async with asyncio.timeout(10):
            await spoken(client, row)
    assert synthesizer.texts == ["So 𠮷 it \ufffd is"]


@post_rows
async def test_a_body_is_spoken_and_an_unknown_field_is_named(client: httpx.AsyncClient, row: PostRow) -> None:
    for fields in ({}, row.more):
        answer = await client.post(row.path, json=row.body(**fields, nonsense=1))
        assert answer.status_code == 200, answer.text
        assert answer.content
        assert "nonsense" in (answer.text if row.has_results else answer.headers["x-ignored"])


@post_rows
async def test_no_body_has_marks_spoken(client: httpx.AsyncClient, synthesizer: FakeSynthesizer, row: PostRow) -> None:
    answer = await client.post(row.path, json=row.body(MARKED))
    assert answer.status_code == 200, answer.text
    assert set(synthesizer.texts) == {"Hello there!"}
    told = answer.text if row.has_results else answer.headers["x-ignored"]
    assert all(each in told for each in ("link target 1", "emoji 1", *LEFT_OUT))


@post_rows
async def test_a_tag_of_a_body_holds_to_the_next_one(row: PostRow) -> None:
    for follows in (True, False):
        synthesizer = FakeSynthesizer(replace(CUSTOM_VOICE, supports_instructions=follows), utterance())
        answer = await posted(synthesizer, row.path, json=row.body(TAGGED))
        assert answer.status_code == 200, answer.text
        assert set(styles_of(synthesizer)) == set(STYLED if follows else [(None, "One. Two. Three.")])
        told = answer.text if row.has_results else answer.headers.get("x-ignored", "")
        assert all((tag in told) is not follows for tag in TAGS)


@post_rows
async def test_a_body_without_text_is_refused(client: httpx.AsyncClient, row: PostRow) -> None:
    for body in ({"voice": VOICE}, {"txt": "Hello"}):
        answer = await client.post(row.path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, row.text)
    for content in ("{", "[]"):
        answer = await client.post(row.path, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@post_rows
async def test_a_number_of_a_body_is_refused_by_its_name(client: httpx.AsyncClient, row: PostRow) -> None:
    for (body, param), number in product(row.numbers, NUMBERS):
        answer = await client.post(row.path, content=body.replace("?", number))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param.rpartition(".")[2]), number
        assert param in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", [name for name, row in POSTS.items() if row.query_numbers])
async def test_a_number_of_a_query_is_refused_by_its_name(client: httpx.AsyncClient, name: str) -> None:
    row = POSTS[name]
    for (query, param), number in product(row.query_numbers, [*NUMBERS[:-1], "9" * 100, "1e30", "²", "1__0"]):
        answer = await client.post(row.with_query(query) + number, json=row.body())
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), number


@post_rows
async def test_without_room_it_is_a_429_and_without_a_model_a_503(row: PostRow) -> None:
    for synthesizer, expected in (
        (FakeSynthesizer(script=[Overloaded("full", 1.5)]), (429, "2", "rate_limit_exceeded")),
        (FakeSynthesizer(None), (503, "1", "not_ready")),
    ):
        answer = await posted(synthesizer, row.path, json=row.body())
        assert (answer.status_code, answer.headers["retry-after"], answer.json()["error"]["code"]) == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/audio/text", {"input": "Hello.", "voice": "alloy"}),
        ("/v1/pronunciation-dictionaries/add-from-rules", {"name": "names", "rules": []}),
    ],
)
async def test_without_room_what_is_silent_is_answered(path: str, body: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(models: SpeechModels, client: str) -> None:
        raise Overloaded("full", 1.5)

    monkeypatch.setattr(SpeechModels, "check_room", full)
    async with client_for(FakeSynthesizer()) as client:
        assert (await client.post(path, json=body)).status_code != 429
        spoken = await client.post("/v1/audio/speech", json={"input": "Hello.", "voice": "alloy"})
    assert spoken.status_code == 429


@post_rows
async def test_speech_that_fails_at_once_is_an_error(row: PostRow) -> None:
    answer = await posted(FakeSynthesizer(script=[LOST]), row.path, json=row.body())
    if row.has_results:
        assert answer.json()["results"][0]["status"] == "error"
    else:
        assert answer.status_code >= 500
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@post_rows
@pytest.mark.parametrize("text", ["...", "</expr>"])
async def test_a_text_without_words_is_answered_without_the_synthesizer(
    client: httpx.AsyncClient, synthesizer: FakeSynthesizer, row: PostRow, text: str
) -> None:
    answer = await client.post(row.path, json=row.body(text))
    assert answer.status_code == 200
    assert answer.content
    assert synthesizer.requests == []


@post_rows
async def test_who_leaves_ends_its_speech(row: PostRow) -> None:
    synthesizer = FakeSynthesizer(script=[chunk(FRAME), asyncio.Event()])
    api = one_api(synthesizer, ApiSettings(admission=AdmissionSettings(client_streams=1)))
    async with asgi.http(api, "POST", row.path, body=row.body()) as connection:
        await synthesizer.waiting.wait()
        connection.receive({"type": "http.disconnect"})
        await synthesizer.closed.wait()
        await asyncio.wait((connection.task,))
    assert len(synthesizer.requests) == 1
    synthesizer.script = utterance()
    async with asgi.http(api, "POST", row.path, body=row.body()) as connection:
        start: Message = await connection.next()
        assert start["status"] == 200
