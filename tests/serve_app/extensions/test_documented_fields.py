"""Each field that a dialect's vendor or server documents: it has an effect, or the answer names it."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

import pytest

from deployments.protocol import ModelInfo
from serve_app.api.resolve import make_utterance
from serve_app.config import ApiSettings
from serve_app.extensions.live.live_text import LiveTexts
from tests.serve_app import asgi
from tests.serve_app.extensions.client import AUDIO_FIELDS, Client, Json, audio_in
from tests.serve_app.fake import CUSTOM_VOICE, FOLLOWED, FakeSynthesizer, followed, utterance
from tests.serve_app.one_model import client_of, one_api
from tools.suites.documented import Documented, Place, Sent
from tools.suites.rows import DOCUMENTED

pytestmark = pytest.mark.anyio


LANGUAGES = [name for name, described in DOCUMENTED.items() if described.language]
WALK = [(dialect, index) for dialect, described in DOCUMENTED.items() for index in range(len(described.places))]


@pytest.fixture(autouse=True)
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_utterance, "draw_seed", lambda: 7)


def placed(described: Documented, place: Place, fields: Json) -> Documented:
    """The dialect with more fields in that place."""
    if place.message is None:
        return replace(described, query={**described.query, **fields})
    messages = copy.deepcopy([*described.messages])
    inner: Any = messages[place.message]
    for name in place.inside.split(".") if place.inside else ():
        inner = inner.setdefault(name, {})
    if isinstance(inner, list):  # of a dialogue's inputs: in a second one, behind the first
        inner.append({"text": "Bye. ", "voice_id": "serena", **fields})
    else:
        inner.update(fields)
    return replace(described, messages=messages)


@dataclass(frozen=True)
class Outcome:
    told: object  # all that could be heard or read, without ids
    ignored: dict[str, str]  # reasons by name
    refusal: str  # the error, if there is one


def scrubbed(value: Any) -> Any:
    """Without what differs each time, and without what is named as ignored."""
    if isinstance(value, dict):
        left_out = ("event_id", "item_id", "id", "ignored", "previous_item_id", "usage")
        return {name: scrubbed(inner) for name, inner in value.items() if name not in left_out}
    return [scrubbed(inner) for inner in value] if isinstance(value, list) else value


def of_header(headers: Mapping[str, str]) -> dict[str, str]:
    entries = [entry for entry in headers.get("x-ignored", "").removesuffix(")").split("); ") if entry]
    return dict(entry.split(" (", 1) for entry in entries)  # type: ignore[arg-type,misc]


def of_messages(messages: list[Json]) -> dict[str, str]:
    entries = [entry for message in messages for entry in message.get("ignored", ())]
    return {entry["field"]: entry["reason"] for entry in entries}


class Server:
    """The surface over one synthesizer, asked again and again."""

    def __init__(self, info: ModelInfo) -> None:
        self.synthesizer = FakeSynthesizer(info, followed() if info.word_times else utterance())
        self.texts = LiveTexts()
        self.api = one_api(self.synthesizer, ApiSettings(), opened={"live": self.texts})

    async def outcome(self, described: Documented) -> Outcome:
        self.synthesizer.requests, self.synthesizer.texts = [], []
        async with asyncio.timeout(20):
            return await (self._of_socket if described.ends_with else self._of_request)(described)

    def _asked(self) -> object:
        ours = [repr(replace(request, request_id="", mailbox=None, marks=())) for request in self.synthesizer.requests]
        return ours, self.synthesizer.texts

    async def _of_request(self, described: Documented) -> Outcome:
        async with client_of(self.api) as client:
            answer = await client.post(described.path, params=described.query, json=described.messages[0])
        names = ("content-type", "content-length", "x-sample-rate")
        headers = [answer.headers.get(name) for name in names if name != "content-length" or answer.status_code == 200]
        content: object = answer.content
        ignored = of_header(answer.headers)
        if answer.headers["content-type"].startswith("application/json") and answer.status_code == 200:
            told = answer.json()
            ignored |= of_messages(told.get("results", []))
            content = scrubbed({name: value for name, value in told.items() if name != "request_id"})
            headers = [header for header in headers if header is None or not header.isdigit()]
        if answer.headers["content-type"].startswith("text/event-stream"):
            content = [line for line in answer.text.split('"') if len(line) != 16]  # the context's own id
        refusal = "" if answer.is_success else answer.text
        return Outcome((headers, content, self._asked()), ignored, refusal)

    async def _of_socket(self, described: Documented) -> Outcome:
        connection = asgi.websocket(self.api, described.path, headers={"x-request-id": "conn"})
        connection._scope["query_string"] = urlencode(described.query).encode()
        connection._scope["subprotocols"] = described.protocols
        async with connection:
            client = await Client(connection).accepted()
            client.send(*described.messages)
            messages: list[Json] = []
            audio = bytearray()
            while not any(is_error(last) or last.items() >= described.ends_with.items() for last in messages[-1:]):
                got = await client.next()
                if isinstance(got, bytes):
                    audio += got
                    continue
                audio += audio_in(got)
                messages.append({name: value for name, value in got.items() if name not in AUDIO_FIELDS})
        ignored = of_header(client.headers) | of_messages(messages)
        shown = sorted({json.dumps(scrubbed(message), sort_keys=True) for message in messages})
        refusal = json.dumps(messages[-1]) if is_error(messages[-1]) else ""
        return Outcome((shown, bytes(audio), self._asked()), ignored, refusal)


def is_error(message: Json) -> bool:
    """Whether it has the form of each dialect's errors: see docs/add-extension.md."""
    return bool(message.get("error")) or str(message.get("type")).lower() == "error"


def sent(value: object) -> Sent:
    return value if isinstance(value, Sent) else Sent(value)


def reported(described: Documented, place: Place, name: str) -> str:
    """As the answer calls it: by its path, without the object that is all of a message."""
    return ".".join(part for part in (*place.inside.split("."), name) if part and part not in described.wrappers)


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[Server]:
    server = Server(FOLLOWED)
    yield server
    await server.texts.aclose()


@pytest.mark.parametrize(("dialect", "index"), WALK)
async def test_each_has_an_effect_or_is_named(server: Server, dialect: str, index: int) -> None:
    described = DOCUMENTED[dialect]
    place = described.places[index]
    without: dict[str, Outcome] = {}
    silent = []
    for name in place.fields:
        given = sent(place.fields[name])
        if (key := repr(given.beside)) not in without:
            without[key] = await server.outcome(placed(described, place, given.beside))
        with_it = await server.outcome(placed(described, place, {**given.beside, name: given.value}))
        is_named = reported(described, place, name) in with_it.ignored
        is_refused = name in with_it.refusal or "does not clone voices" in with_it.refusal
        has_effect = not with_it.refusal and with_it.told != without[key].told
        if not (is_named or is_refused or has_effect):
            silent.append(name)
    assert silent == [], "these fields change nothing: give a value that differs from the default, or report them"


@pytest.mark.parametrize("dialect", DOCUMENTED)
async def test_the_same_is_told_each_time(server: Server, dialect: str) -> None:
    """Else any field would seem to have an effect."""
    first = await server.outcome(DOCUMENTED[dialect])
    assert first.refusal == ""
    assert (await server.outcome(DOCUMENTED[dialect])).told == first.told


@pytest.mark.parametrize("dialect", [name for name, described in DOCUMENTED.items() if described.style])
async def test_a_style_that_the_model_does_not_follow_is_named(server: Server, dialect: str) -> None:
    described = DOCUMENTED[dialect]
    server.synthesizer.info = replace(CUSTOM_VOICE, supports_instructions=False)
    for name in described.style:
        for place in (place for place in described.places if name in place.fields):
            got = await server.outcome(placed(described, place, {name: "Softly."}))
            assert got.ignored == {reported(described, place, name): "the loaded model does not follow instructions"}


@pytest.mark.parametrize("dialect", LANGUAGES)
async def test_a_region_that_is_dropped_is_named(server: Server, dialect: str) -> None:
    described, name = DOCUMENTED[dialect], DOCUMENTED[dialect].language
    server.synthesizer.info = CUSTOM_VOICE
    place = next(place for place in described.places if name in place.fields)
    for language, is_named in (("de-AT", True), ("zh-Hans", True), ("en_GB", True), ("de", False), ("DEU", False)):
        got = await server.outcome(placed(described, place, {name: language}))
        assert (reported(described, place, name) in got.ignored) is is_named


@pytest.mark.parametrize("dialect", LANGUAGES)
async def test_a_language_that_the_voice_has_not_learnt_is_named(server: Server, dialect: str) -> None:
    described, name = DOCUMENTED[dialect], DOCUMENTED[dialect].language
    place = next(place for place in described.places if name in place.fields)
    got = await server.outcome(placed(described, place, {name: "es-MX"}))
    if described.is_strict:
        assert f"{name}: 'es-MX' is not supported" in got.refusal
    else:
        reason = "not supported by the loaded voice, which speaks chinese, english, german: used auto"
        assert got.ignored == {reported(described, place, name): reason}


async def test_the_regions_of_kokoros_codes_are_named_by_kokoros_name(server: Server) -> None:
    got = await server.outcome(placed(DOCUMENTED["OpenAI"], DOCUMENTED["OpenAI"].places[0], {"lang_code": "b"}))
    assert got.ignored == {"lang_code": "spoken as english: regions and scripts are ignored"}
