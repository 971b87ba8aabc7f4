"""What clients leave out, spell in another way or break, in every dialect."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.config import ApiSettings
from serve_app.extensions.voices.settings import VoiceSettings
from tests.serve_app.extensions.client import Client, Json, audio_in, connect, talking
from tests.serve_app.extensions.test_contract import is_refusal, socket_rows, until
from tests.serve_app.extensions.voices.speakers import store
from tests.serve_app.fake import BASE, CUSTOM_VOICE, VOICE_DESIGN, FakeSynthesizer, pcm_of, utterance
from tests.serve_app.one_model import client_for, posted
from tools.suites.row import PostRow, SocketRow
from tools.suites.rows import POSTS, SOCKETS, is_here

pytestmark = pytest.mark.anyio

SPEECH = "/v1/audio/speech"
VOICELESS = "write $voice wherever the row's sample names a voice (tools/suites/rows)"
HELLO = {"input": "Hello", "voice": "ryan"}
EMBEDDED = replace(CUSTOM_VOICE, languages=("english",), spoken_form="english")
UNNAMED = {name: row for name, row in SOCKETS.items() if "$voice" not in row.sample.path.partition("?")[0]}
OPTIONAL = {name: row for name, row in POSTS.items() if "$voice" not in row.sample.path.partition("?")[0]}


def without_voice(value: Any) -> Any:
    """Without the parts of a sample that name its voice: they contain `$voice`."""
    match value:
        case dict():
            kept = {name: without_voice(item) for name, item in value.items() if item not in ("$voice", ["$voice"])}
            return {name: item for name, item in kept.items() if item != {}}
        case list() | tuple():
            return [without_voice(item) for item in value]
    return value


def plain_path(row: PostRow | SocketRow) -> str:
    path, _, query = row.sample.path.partition("?")
    return "&".join([f"{path}?", *(part for part in query.split("&") if "$voice" not in part)])


@pytest.mark.parametrize("voice", ["", " ", {"id": None}, {"id": ""}])
async def test_an_empty_voice_is_none(client: httpx.AsyncClient, voice: object) -> None:
    assert (await client.post(SPEECH, json={**HELLO, "voice": voice})).headers["x-talkray-voice"] == "serena"


@pytest.mark.parametrize("default", [None, "Uncle_Fu"])
@pytest.mark.parametrize("row", OPTIONAL.values(), ids=OPTIONAL)
async def test_a_body_without_a_voice_is_spoken_by_the_default_one(row: PostRow, default: str | None) -> None:
    synthesizer = FakeSynthesizer(script=utterance())
    body = json.loads(json.dumps(without_voice(dict(row.sample.body or {}))).replace("$text", "Hello."))
    async with client_for(synthesizer, ApiSettings(default_voice=default)) as client:
        answer = await client.post(plain_path(row), json=body)
    assert answer.status_code == 200, answer.text
    chosen = (default or CUSTOM_VOICE.voices[0]).lower()
    assert {request.voice for request in synthesizer.requests} == {chosen}, VOICELESS
    told = answer.json()["results"][0]["voice"] if row.has_results else answer.headers["x-talkray-voice"]
    assert told == chosen


@pytest.mark.parametrize("row", UNNAMED.values(), ids=UNNAMED)
async def test_a_socket_without_a_voice_is_spoken_by_the_default_one(row: SocketRow) -> None:
    synthesizer = FakeSynthesizer(script=utterance())
    messages = json.loads(json.dumps(without_voice(row.sample.messages)).replace("$text", "Hello there."))
    async with connect(synthesizer, plain_path(row), subprotocols=row.sample.protocols) as connection:
        client = await Client(connection).accepted()
        client.send(*messages)
        told, _ = await until(client, row.ends_with)
    assert [request.voice for request in synthesizer.requests] == ["serena"], VOICELESS
    notes = client.headers | {name: value for message in told for name, value in message.items()}
    assert "serena" in (notes.get("x-talkray-voice"), notes.get("voice"))


@pytest.mark.parametrize(
    ("info", "param", "what"),
    [(BASE, "ref_audio", "set voice to a stored voice"), (VOICE_DESIGN, "instructions", "creates the voice")],
)
async def test_a_model_that_cannot_choose_says_what_to_send(info: Any, param: str, what: str) -> None:
    for path, body in ((SPEECH, {"input": "Hello"}), ("/tts/bytes", {"transcript": "Hello"})):
        if not is_here(path):
            continue
        answer = await posted(FakeSynthesizer(info, utterance()), path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert what in answer.json()["error"]["message"]


@pytest.mark.parametrize("text", ["Привет, как дела?", "你好，世界", "مرحبا بك", "नमस्ते दुनिया", "สวัสดี", "**Привет**"])
async def test_a_script_that_the_voice_cannot_speak_is_refused_everywhere(text: str) -> None:
    for row in POSTS.values():
        synthesizer = FakeSynthesizer(EMBEDDED, utterance())
        for more in ({}, {"any_language": True}):
            answer = await posted(synthesizer, row.path, json=row.body(text, **more))
            assert answer.status_code == (200 if row.has_results else 400), (row.path, answer.text)
            assert "none of it can be spoken" in answer.text
            assert row.has_results or f'"{answer.json()["error"]["param"]}": ' in json.dumps(row.sample.body)
        assert synthesizer.requests == []


@socket_rows
@pytest.mark.parametrize("text", ["Привет, как дела?", "你好，世界"])
async def test_so_it_is_on_a_socket_whose_turn_ends(row: SocketRow, text: str) -> None:
    synthesizer = FakeSynthesizer(EMBEDDED, utterance())
    async with connect(synthesizer, row.path, subprotocols=row.sample.protocols) as connection:
        client = await Client(connection).accepted()
        client.send(*row.speak(text))
        told, _ = await until(client, row.unspeakable or row.ends_with)
        assert "none of it can be spoken" in str(told)
        if row.closing.stays_open:
            client.send(*row.speak("Hello.", again=True))
            await until(client, row.ends_with)
    assert synthesizer.texts == (["Hello."] if row.closing.stays_open else [])


@pytest.mark.parametrize("name", [name for name, row in SOCKETS.items() if row.is_strict])
async def test_a_strict_socket_refuses_a_language_that_a_released_model_does_not_speak(name: str) -> None:
    for parts, texts in ((["नमस्ते", " दुनिया"], []), (["Привет", " is how one greets friends in Russia."], ["*"])):
        synthesizer, row = FakeSynthesizer(CUSTOM_VOICE, utterance()), SOCKETS[name]
        async with connect(synthesizer, row.path, subprotocols=row.sample.protocols) as connection:
            client = await Client(connection).accepted()
            client.send(*row.speak("".join(parts)))
            told, _ = await until(client, row.ends_with if texts else {"type": "error"})
        assert len(synthesizer.texts) == len(texts)
        assert texts or "unsupported_language" in str(told)


FORMATS = [(row, *each) for row in POSTS.values() for each in row.formats]


@pytest.mark.parametrize(("row", "query", "fields", "name"), FORMATS)
async def test_format_spellings(client: httpx.AsyncClient, row: PostRow, query: str, fields: Json, name: str) -> None:
    kinds = set()
    for spelled in (name, name.upper(), f" {name.title()}\t"):
        path = row.with_query(query.replace("?", spelled.replace("\t", " ")))
        body = json.dumps(row.body(**fields)).replace('"?"', json.dumps(spelled))
        answer = await client.post(path, content=body)
        assert (answer.status_code, "error" in answer.text[:20]) == (200, False), answer.text
        kinds.add(answer.headers["content-type"])
    assert len(kinds) == 1


QUOTED = [
    (SPEECH, {**HELLO, "speed": "2.0", "stream": "false", "response_format": "pcm"}, 2.0),
    (SPEECH, {**HELLO, "speed": " .5 ", "stream": "TRUE", "sample_rate": "24000", "response_format": "pcm"}, 0.5),
    ("/v1/audio/frames", {**HELLO, "seed": "7", "top_k": "5", "do_sample": "True"}, None),
    (
        "/tts/bytes",
        {"transcript": "Hello", "generation_config": {"speed": "2"}, "output_format": {"bit_rate": "9"}},
        2.0,
    ),
    ("/v1/text-to-speech/ryan?output_format=pcm_24000", {"text": "Hello", "voice_settings": {"speed": "2.00"}}, 2.0),
    ("/v1/speak?speed=2&container=none&encoding=linear16", {"text": "Hello"}, 2.0),
]


@pytest.mark.parametrize(("path", "body", "speed"), [row for row in QUOTED if is_here(row[0])])
async def test_number_or_boolean_as_text(client: httpx.AsyncClient, path: str, body: Json, speed: float | None) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert speed is None or len(answer.content) == pytest.approx(len(pcm_of(utterance())) / speed, rel=0.15)
    assert ("content-length" in answer.headers) == (body.get("stream") == "false")


@pytest.mark.parametrize(
    ("field", "value"),
    [("speed", value) for value in ("", " ", "nan", "1e400", "fast", "0x1", "1_0", "١", "1,5")]
    + [(name, value) for name in ("stream", "do_sample") for value in ("yes", "1", "on", " ")]
    + [("seed", "1.5"), ("top_k", "many")],
)
async def test_text_that_may_mean_something_else_is_refused(client: httpx.AsyncClient, field: str, value: str) -> None:
    answer = await client.post(SPEECH, json={**HELLO, field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("row", POSTS.values(), ids=POSTS)
async def test_half_a_surrogate_pair_is_replaced_and_told(synthesizer: FakeSynthesizer, row: PostRow) -> None:
    body = row.body("So \ud83d it is \U0001f600.")
    answer = await posted(synthesizer, row.path, content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    assert set(synthesizer.texts) == {"So \ufffd it is."}
    assert "half a surrogate pair" in answer.headers["x-ignored"]


@pytest.mark.parametrize("base", ["tts-1", "tts-1-hd", "gpt-4o-mini-tts", "qwen3-tts", "qwen-tts"])
async def test_a_pinned_model_is_the_one_without_its_date(client: httpx.AsyncClient, base: str) -> None:
    for pin in ("-2025-12-15", "-20251215", "-1106", "-latest", "@2025-12-15"):
        assert (await client.post(SPEECH, json={**HELLO, "model": base + pin})).status_code == 200
        assert (await client.get(f"/v1/models/{base}{pin}")).json()["root"] == CUSTOM_VOICE.name
    for other in ("-mini", "-2025-12-15-x", "2025-12-15"):
        assert (await client.post(SPEECH, json={**HELLO, "model": base + other})).status_code == 404


@pytest.mark.parametrize("bit_rate", ["5", "257", "512"])
async def test_a_bit_rate_has_the_range_of_its_format(client: httpx.AsyncClient, bit_rate: str) -> None:
    answer = await client.post(f"/v1/text-to-speech/ryan?output_format=opus_48000_{bit_rate}", json={"text": "Hello."})
    assert answer.status_code == 400
    assert "For opus, use 6000 to 256000" in answer.json()["error"]["message"]
    allowed = await client.post("/v1/text-to-speech/ryan?output_format=opus_48000_256", json={"text": "Hello."})
    assert allowed.status_code == 200


async def test_too_many_values_are_refused_before_any_is_looked_at(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/audio/speech", content='{"input": "x", "y": [' + "1," * (1 << 17) + "1]}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


async def test_a_long_input_is_refused_before_it_is_looked_at(client: httpx.AsyncClient) -> None:
    begun_s = time.thread_time()
    for path, field in (("/v1/audio/speech", "input"), ("/v1/speak", "text"), ("/tts/bytes", "transcript")):
        if not is_here(path):
            continue
        answer = await client.post(path, json={field: "<" + "a" * 200_000 + '{ "word"' * 20_000, "voice": "ryan"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "string_above_max_length")
    assert time.thread_time() - begun_s < 10  # of quadratic work: minutes


@socket_rows
@pytest.mark.parametrize(("voice", "more"), [("So \ud83d", {}), ("ryan", {"x\ud83d": "So \ud83d"})])
async def test_other_halves_do_no_harm(row: SocketRow, voice: str, more: Json) -> None:
    sample = row.sample.filled(text="Hello.", voice=voice)
    async with talking(FakeSynthesizer(script=utterance()), row.path, subprotocols=row.sample.protocols) as client:
        client.send(*({**message, **more} for message in sample.messages))
        while isinstance(told := await client.next(), dict) and not (audio_in(told) or is_refusal(row, told)):
            assert "closed" not in told


@pytest.mark.parametrize(("row", "fields", "named"), [(row, *each) for row in POSTS.values() for each in row.wrong])
async def test_errors_name_the_clients_field(client: httpx.AsyncClient, row: PostRow, fields: Json, named: str) -> None:
    answer = await client.post(row.path, json=row.body(**fields))
    told = answer.json()
    error = told.get("error") or told.get("detail") or told
    assert answer.status_code == 400
    assert named in (error.get("param"), error.get("loc")) or error.get("message", "").startswith(named), told


NOBODY = "nobody"
ASKED = {row.name: row for row in POSTS.values() if row.name}


def unknown_voice(row: PostRow) -> tuple[str, Json]:
    return row.sample.filled(voice=NOBODY).path, row.body(voice=NOBODY)


def named() -> tuple[str, str]:
    """What the page says of dialects that speak, and of those that refuse."""
    page = (Path(__file__).parents[3] / "docs" / "clients.md").read_text()
    found = re.search(r"\*\*An unknown voice\*\* is replaced(.*?)\. (The dialects.*?) return a 400", page, re.DOTALL)
    assert found is not None
    return found[1], found[2]


@pytest.mark.parametrize("dialect", ASKED)
async def test_the_page_says_what_an_unknown_voice_gets(client: httpx.AsyncClient, dialect: str) -> None:
    path, body = unknown_voice(ASKED[dialect])
    answer = await client.post(path, json=body)
    is_refused = answer.status_code == 400 or '"status": "error"' in answer.text
    speaking, refusing = named()
    told, advice = (dialect in speaking, dialect in refusing), "list it in docs/clients.md, at **An unknown voice**"
    assert told == (not is_refused, is_refused), f"{dialect} {'refuses it' if is_refused else 'speaks'}: {advice}"


@pytest.mark.parametrize("dialect", [name for name in ("Deepgram", "ElevenLabs", "Cartesia") if name in ASKED])
async def test_the_default_voice_may_have_a_name_in_any_script(tmp_path: Path, dialect: str) -> None:
    path, body = unknown_voice(ASKED[dialect])
    settings = ApiSettings(voices=VoiceSettings(store=str(tmp_path)), default_voice="声音")
    async with client_for(FakeSynthesizer(BASE, utterance()), settings) as client:
        await store(client, "声音")
        answer = await client.post(path, json=body)
    assert answer.status_code == 200
    assert "unknown voice, used ??" in answer.headers["x-ignored"]
