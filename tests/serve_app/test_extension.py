"""Which extensions run: `api.extensions`."""

import json
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
import yaml
from pydantic import ValidationError
from starlette.routing import compile_path

from deployments.config import Strict
from deployments.errors import InvalidRequest, StartError
from deployments.protocol import ModelInfo
from serve_app import extensions
from serve_app.api.application import OWN_TAGS, create_api
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.request_record import RequestRecord
from serve_app.api.resolve.resolver import RequestHooks, Resolver
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.routing import dialects_of
from serve_app.api.speech_service import SpeechService
from serve_app.api.voice_source import VoiceSource
from serve_app.audio.formats import AudioFormat
from serve_app.config import AdmissionSettings, ApiSettings, AppConfig
from serve_app.config_file import explain
from serve_app.extension import Dialect, Extension, ExtensionState, JsonRoute, Route, hooks_of, in_order
from serve_app.extensions import BUILT_IN, _required, load_extensions
from serve_app.extensions.text.lexicon import LexiconSource
from serve_app.extensions.text.reading import TextSettings
from serve_app.extensions.voices.library import Voices
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModels
from serve_app.text.spoken import SpokenText, TextSpan
from tests.serve_app import asgi
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, utterance
from tests.serve_app.one_model import client_for, client_of, one_api
from tools.suites.rows import POSTS

pytestmark = pytest.mark.anyio
DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = (DOCS / "extensions.md").read_text()
ALL = {extension.name: extension for extension in load_extensions()}
PLAIN = next(name for name, extension in ALL.items() if extension.settings is Strict)


async def answer(service: SpeechService) -> str:
    return "ours"


def package(monkeypatch: pytest.MonkeyPatch, operation: str = "GET /ours", **more: object) -> None:
    """A package of a user."""
    module = ModuleType("house")
    dialect = Dialect("House", routes=(Route(operation, answer, "Ours"),))
    module.EXTENSION = Extension(**{"name": "house", "dialects": (dialect,), **more})  # type: ignore[attr-defined, arg-type]
    module.OTHER = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "house", module)


class Socket:
    subprotocol = None
    run = answer


def without(name: str) -> tuple[str, ...]:
    """All built-in ones but this one and those that require it."""
    left = set(BUILT_IN) - {name}
    while broken := {each for each in left if set(ALL[each].requires) - left}:
        left -= broken
    return tuple(each for each in BUILT_IN if each in left)


@pytest.mark.parametrize("name", BUILT_IN)
async def test_without_an_extension_its_places_are_404_and_all_others_answer(name: str) -> None:
    selected = without(name)
    gone = [dialect for each in BUILT_IN if each not in selected for dialect in ALL[each].dialects]
    places = {route.operation for dialect in gone for route in dialect.routes if route.json_field is None}
    offered = {path for dialect in dialects_of(load_extensions(selected)) for path, _ in dialect.sockets}
    app = one_api(FakeSynthesizer(script=utterance()), ApiSettings(extensions=selected))
    async with client_of(app) as client:
        for method, path in map(str.split, places):
            got = await client.request(method, path.replace("{", "").replace("}", ""))
            assert got.status_code in (404, 405), (method, path)
        for path in {path for dialect in gone for path, _ in dialect.sockets} - offered:
            async with asgi.websocket(app, path) as connection:
                assert (await connection.next())["status"] == 404, path
                assert json.loads((await connection.next())["body"])["error"]["code"] == "not_found"
        listed = (await client.get("/openapi.json")).json()["paths"]
        assert not [place for place in places if place.split()[0].lower() in listed.get(place.split()[1], {})]
        patterns = [compile_path(place.split()[1])[0] for place in places]
        for row in POSTS.values():
            if not any(pattern.match(row.path.partition("?")[0]) for pattern in patterns):
                assert (await client.post(row.path, json=row.body())).status_code == 200, row.path


@pytest.mark.parametrize(
    ("selected", "says"),
    [
        (("texts",), f"'texts' is unknown. Use default, {', '.join(BUILT_IN)}, or"),
        (("voices", "voices"), "'voices' is listed twice"),
        (("default", BUILT_IN[-1]), f"'{BUILT_IN[-1]}' is listed twice"),
        *(
            ((name,), f"{name} requires {', '.join(_required(ALL[name]))}. Add them")
            for name in ALL
            if _required(ALL[name])
        ),
        (("nowhere.at_all:EXTENSION",), "cannot be imported (No module named 'nowhere')"),
        (("house:MISSING",), "cannot be imported (module 'house' has no attribute 'MISSING')"),
        (("house:OTHER",), "'house:OTHER' is a int. Name an instance of Extension"),
        (("house:",), "'house:' is unknown"),
    ],
)
def test_wrong_lists_fail_with_a_remedy(monkeypatch: pytest.MonkeyPatch, selected: tuple[str, ...], says: str) -> None:
    package(monkeypatch)
    with pytest.raises(StartError) as caught:
        load_extensions(selected)
    assert str(caught.value).startswith("api.extensions: ")
    assert says in str(caught.value)


def test_the_settings_of_the_document_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "examples")
    for block in re.findall(r"^```yaml\n(.*?)^```", DOCUMENT, re.DOTALL | re.M):
        assert load_extensions(ApiSettings.model_validate(yaml.safe_load(block)["api"]).extensions)


TAKEN = next(path for each in ALL.values() for dialect in each.dialects for path, _ in dialect.sockets)


def test_the_document_names_each_dialect() -> None:
    dialects = [dialect for each in ALL.values() for dialect in each.dialects if dialect.sample is not None]
    listed = re.findall(r"\*\*(.*?)\*\*", (DOCS / "dialects.md").read_text())
    assert {dialect.name.partition(",")[0] for dialect in dialects} <= {*listed}, "list these in docs/dialects.md"


# Names of extensions that the core may have: fields of its own JSON, the pool that it sizes by Serve's file, and
# settings that moved to an extension.
SHARED = {"text", "models", "voices"}
KNOWN = {"serve_app/config.py": {'"jobs"', "api.jobs", "api.records", "api.page", "api.text", "api.continuity"}}
KNOWN["serve_app/config_file.py"] = {'"jobs"'}


def test_the_core_names_no_extension() -> None:
    names, root = "|".join(BUILT_IN), Path(extensions.__file__).parents[2]
    named = re.compile(
        rf"""["'](?:{"|".join({*BUILT_IN} - SHARED)})["']|\bapi\.(?:{names})\b|extensions\.(?:{names})\b"""
    )
    for file in (*(root / "serve_app").rglob("*.py"), *(root / "deployments").rglob("*.py")):
        place = file.relative_to(root).as_posix()
        if not place.startswith("serve_app/extensions/"):
            found = {*named.findall(file.read_text(encoding="utf-8"))}
            assert found <= KNOWN.get(place, set()), f"{place} names extensions: ask what is loaded instead"


SHARED_BY_KINDS = (Route("PUT /a", answer, ""), JsonRoute("PUT /a", answer, json_field="b"))


@pytest.mark.parametrize(
    ("operation", "more", "says"),
    [
        ("POST /v1/audio/text", {}, "text and house both have POST /v1/audio/text"),
        ("GET /v1/audio/models", {}, "the core and house both have GET /v1/audio/models"),
        ("GET /ours", {"dialects": (Dialect("House", sockets=((TAKEN, Socket),)),)}, f"both have {TAKEN}"),
        ("", {"dialects": (Dialect("", (JsonRoute("PUT /a", answer, json_field="b"),)),)}, "has PUT /a only with"),
        ("", {"dialects": (Dialect("", (Route("GET /a", answer, ""),) * 2),)}, "house and house both have GET /a"),
        ("", {"dialects": (Dialect("", SHARED_BY_KINDS),)}, "shares PUT /a with a route that is not a JsonRoute"),
        ("GET /ours", {"requires": ("magic",)}, "house requires magic"),
        ("GET /ours", {"name": BUILT_IN[-1]}, f"'{BUILT_IN[-1]}' is listed twice"),
        ("GET /ours", {"name": "access"}, "access is also the name of a setting"),
    ],
)
def test_a_misfit_fails(monkeypatch: pytest.MonkeyPatch, operation: str, more: dict[str, object], says: str) -> None:
    package(monkeypatch, operation, **more)
    with pytest.raises(StartError) as caught:
        dialects_of(load_extensions(("default", "house:EXTENSION")))
    assert says in str(caught.value)


def test_an_extension_imports_the_core_and_what_it_requires() -> None:
    for name, extension in ALL.items():
        allowed = {name, *(each for each in BUILT_IN if each in _required(extension))}
        for file in (Path(extensions.__file__).parent / name).rglob("*.py"):
            used = set(re.findall(r"serve_app\.extensions\.(\w+)", file.read_text(encoding="utf-8")))
            assert used <= allowed, (file, used - allowed)


# What is behind sessions and routes: a dialect reaches it through them.
BEHIND = (
    *("speech.speech_models", "speech.segments", "speech.utterance_synthesizer"),
    *("speech.replica_synthesizer", "api.access.access_control", "api.access.keys", "api.parsing.uploads", "ingress"),
)


def test_a_dialect_knows_sessions_and_routes_not_what_is_behind_them() -> None:
    for name, extension in ALL.items():
        if any(dialect.sample is not None for dialect in extension.dialects):
            for file in (Path(extensions.__file__).parent / name).rglob("*.py"):
                used = re.findall(r"^from serve_app\.([\w.]+) import", file.read_text(encoding="utf-8"), re.MULTILINE)
                assert not set(used) & set(BEHIND), file


class House(ExtensionState):
    """Does what its test says."""

    def __init__(self, **methods: Callable[..., object]) -> None:
        self._methods = methods

    async def resolve(self, resolver: Resolver, speech: SpeechRequest, utterance: Utterance) -> Any:
        return self._call("resolve", utterance, utterance)

    def observe(self, utterance: Utterance, info: ModelInfo) -> Any:
        return self._call("observe", None, utterance, info)

    def receive(self, record: RequestRecord) -> None:
        self._call("receive", None, record)

    def _call(self, name: str, default: object, *arguments: object) -> Any:
        return self._methods[name](*arguments) if name in self._methods else default


SPEECH = "/v1/audio/speech"
BODY = {"model": "tts-1", "input": "Hello.", "voice": "ryan", "response_format": "pcm"}
PCM = b"".join(chunk.pcm for chunk in utterance())


async def spoken(monkeypatch: pytest.MonkeyPatch, **methods: Callable[..., object]) -> httpx.Response:
    package(monkeypatch, open=lambda context: House(**methods))
    settings = ApiSettings(extensions=("default", "house:EXTENSION"))
    async with client_for(FakeSynthesizer(script=utterance()), settings) as client:
        return await client.post(SPEECH, json=BODY)


def fail(*_: object) -> None:
    raise RuntimeError("ours")


@pytest.mark.parametrize("selected", [("default", "house:EXTENSION"), ("house:EXTENSION", "default")])
async def test_a_step_comes_behind_built_in_ones(monkeypatch: pytest.MonkeyPatch, selected: tuple[str, ...]) -> None:
    def shout(utterance: Utterance) -> Utterance:
        assert utterance.joins, "the step of continuity came before"
        return replace(utterance.changed(text=utterance.synthesis.text.upper()), spans=())

    package(monkeypatch, open=lambda context: House(resolve=shout))
    synthesizer = FakeSynthesizer(script=utterance())
    settings = ApiSettings.model_validate({"extensions": selected, "continuity": {"joints": True}})
    async with client_for(synthesizer, settings) as client:
        assert (await client.post(SPEECH, json=BODY)).status_code == 200
    assert synthesizer.texts == ["HELLO."]


class Ruler(RequestHooks, VoiceSource, LexiconSource):
    """Makes every decision, with one answer to all."""

    time_words, preparation = len, Mock(return_value="prepared")
    choose_model, read_text = AsyncMock(return_value="chosen"), AsyncMock(return_value="read")


@pytest.mark.parametrize("selected", [("default", "house:EXTENSION"), ("house:EXTENSION", "default")])
async def test_the_last_extension_decides(monkeypatch: pytest.MonkeyPatch, selected: tuple[str, ...]) -> None:
    package(monkeypatch, hooks=(ruler := Ruler()))
    ordered = in_order(load_extensions(selected))
    names = [extension.name for extension in ordered]
    assert names[-1] == "house"
    assert all(names.index(name) < at for at, each in enumerate(ordered) for name in each.requires)
    states = {"voices": Voices(None, VoiceSettings())}
    resolver: Any = Resolver(SpeechModels({}), ApiSettings(), hooks_of(ordered, states))
    assert (resolver.time_words, resolver.voices, resolver.provider(LexiconSource)) == (len, ruler, ruler)
    body = SpeechBody.model_construct()
    assert (await resolver.choose_model({}, sent={}), resolver.preparation(body)) == ("chosen", "prepared")
    assert await resolver.read_text(body, CUSTOM_VOICE, None) == "read"


async def test_another_extension_may_read_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks, said = RequestHooks(), SpokenText("Hello.", (TextSpan("Read."),), Counter())
    monkeypatch.setattr(hooks, "read_text", AsyncMock(return_value=(said, {})))
    package(monkeypatch, hooks=hooks)
    synthesizer = FakeSynthesizer(script=utterance())
    async with client_for(synthesizer, ApiSettings(extensions=("default", "house:EXTENSION"))) as client:
        answers = [await client.post(path, json=BODY) for path in (SPEECH, "/v1/audio/text")]
    assert ([answer.status_code for answer in answers], synthesizer.texts) == ([200, 200], ["Read."])
    assert answers[1].json()["spoken"] == "Read."


@pytest.mark.parametrize("selected", [("text", "models", "designs", "voices"), ("text", "models", "voices", "designs")])
async def test_the_order_of_extensions_hides_no_route(selected: tuple[str, ...]) -> None:
    async with client_for(FakeSynthesizer(), ApiSettings(extensions=selected)) as client:
        answer = await client.post("/v1/audio/voices/design", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_deployed")


async def test_a_step_that_fails_fails_its_request_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await spoken(monkeypatch, resolve=fail)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "extension_failed")
    assert error["message"] == "The extension house failed during this request."


async def test_a_step_may_refuse_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(utterance: Utterance) -> Utterance:
        raise InvalidRequest("input: not in this house.", "input")

    answer = await spoken(monkeypatch, resolve=refuse)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


async def test_an_observer_sees_each_chunk_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def observe(utterance: Utterance, info: ModelInfo) -> SimpleNamespace:
        return SimpleNamespace(feed=lambda chunk: seen.append(chunk.pcm), end=lambda: seen.append("end"))

    answer = await spoken(monkeypatch, observe=observe)
    assert seen == [*(chunk.pcm for chunk in utterance()), "end"]
    assert answer.content == PCM


@pytest.mark.parametrize(
    "observe",
    [
        fail,
        lambda *_: SimpleNamespace(feed=fail, end=lambda: None),
        lambda *_: SimpleNamespace(feed=lambda chunk: None, end=fail),
    ],
    ids=["begins", "feed", "end"],
)
async def test_an_observer_that_fails_is_logged_once_and_the_speech_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, observe: Callable[..., object]
) -> None:
    answer = await spoken(monkeypatch, observe=observe)
    assert (answer.status_code, answer.content) == (200, PCM)
    [logged] = [each for each in caplog.messages if "the extension house" in each]
    assert logged.endswith("no longer observes it")


async def test_a_record_not_taken_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert (await spoken(monkeypatch, receive=fail)).content == PCM
    assert [each for each in caplog.messages if each.endswith("the extension house failed to process its record")]


async def test_an_extension_opens_behind_what_it_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    package(monkeypatch, requires=("voices",), open=lambda context: found.append(context.opened["voices"]))
    settings = ApiSettings(extensions=("house:EXTENSION", "voices", "text"))
    one_api(FakeSynthesizer(), settings)
    assert [type(each).__name__ for each in found] == ["Voices"]


@pytest.mark.parametrize("audio_format", AudioFormat)
@pytest.mark.parametrize("more", [{}, {"stream": False}, {"stream_format": "sse"}], ids=["streamed", "whole", "events"])
async def test_the_core_alone_speaks(audio_format: AudioFormat, more: dict[str, object]) -> None:
    async with client_for(FakeSynthesizer(script=utterance()), ApiSettings(extensions=())) as client:
        answer = await client.post(SPEECH, json={**BODY, "response_format": audio_format, **more})
        assert answer.status_code == 200, answer.text
        assert "x-ignored" not in answer.headers
        assert len(answer.content) > 100
        assert (await client.get("/v1/audio/voices")).json()["voices"]
        assert (await client.get("/docs")).status_code == 200
        told = (await client.get("/openapi.json")).json()
        assert "WebSocket" not in told["info"]["description"]
        assert [tag["name"] for tag in told["tags"]] == ["Speech", "Models and voices", "This server"]


async def test_docs_show_our_own_routes_first() -> None:
    async with client_for(FakeSynthesizer(script=utterance())) as client:
        assert [tag["name"] for tag in (await client.get("/openapi.json")).json()["tags"]] == [*OWN_TAGS]


EXTENSION_FIELDS = {"word_timestamps": True, "markup": "ssml", "text_normalization": "on", "lexicon": {"a": "b"}}
EXTENSION_FIELDS |= {"max_segment_chars": 100, "previous_request_id": "one", "prepare": "auto"}


@pytest.mark.parametrize("field", EXTENSION_FIELDS)
async def test_the_core_alone_names_the_fields_that_extensions_read(field: str) -> None:
    body = {**BODY, field: EXTENSION_FIELDS[field], "stream_format": "sse"}
    async with client_for(FakeSynthesizer(script=utterance()), ApiSettings(extensions=())) as client:
        alone = await client.post(SPEECH, json=body)
    assert alone.status_code == 200
    assert f"{field} (" in alone.headers["x-ignored"]
    assert "x-word-times" not in alone.headers


async def test_the_core_alone_reads_english_for_a_voice_that_needs_words() -> None:
    synthesizer = FakeSynthesizer(replace(CUSTOM_VOICE, spoken_form="english"), utterance())
    async with client_for(synthesizer, ApiSettings(extensions=())) as client:
        answer = await client.post(SPEECH, json={**BODY, "input": "It costs $5. 你好"})
    assert synthesizer.texts[0].startswith("it costs five dollars") or "five dollars" in synthesizer.texts[0]
    assert "not read aloud" in answer.headers["x-ignored"]


@pytest.mark.parametrize(
    ("name", "status"), [("base", 200), ("custom", 200), ("tts-1", 200), (None, 200), ("nowhere", 404)]
)
async def test_the_core_alone_chooses_among_models_by_their_names(name: str | None, status: int) -> None:
    infos = {"custom": CUSTOM_VOICE, "base": replace(CUSTOM_VOICE)}
    speakers = {
        each: FakeSynthesizer(replace(info, name=each, checkpoint=f"Qwen/{each}"), utterance())
        for each, info in infos.items()
    }
    served = {each: (one, AdmissionSettings()) for each, one in speakers.items()}
    api = create_api(served, ApiSettings(extensions=()), opened={})
    async with client_of(api) as client:
        answer = await client.post(SPEECH, json={**BODY, "model": name})
    assert answer.status_code == status
    if status == 200:
        asked = [each for each, speaker in speakers.items() if speaker.requests]
        assert asked == ["base" if name == "base" else "custom"]
    else:
        assert "custom, base" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("api", "says"),
    [
        ({"voices": {"max_voice": 1}}, "api.voices.max_voice: .*valid keys: max_bytes, max_voices"),
        ({"voices": {"max_voices": "many"}}, "api.voices.max_voices: Input should be a valid integer"),
        ({"text": {"joints": True}}, "api.text.joints: write api.continuity.joints instead"),
        ({"page": False}, "api.page: delete this removed setting: the page is an extension"),
        ({"voice": {}}, "api.voice: .*valid keys: access, .*continuity.*voices"),
        ({"extensions": ["text"], "voices": {}}, "api.voices: this extension is not in api.extensions"),
        ({PLAIN: {}}, f"api.{PLAIN}: this extension is not in api.extensions, or it has no settings"),
        ({"extensions": ["texts"], "voices": {}}, "api: .*'texts' is unknown"),
    ],
)
def test_a_wrong_setting_of_an_extension_is_named_with_the_remedy(api: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AppConfig.model_validate({"api": api})
    assert re.search(says, explain(caught.value)), explain(caught.value)


def test_settings_of_extensions_are_those_of_the_file_or_the_defaults() -> None:
    settings = AppConfig.model_validate({"api": {"voices": {"max_voices": 7}}}).api
    settings = pickle.loads(pickle.dumps(settings.model_copy(update={"server_timing": True})))
    assert settings.of(VoiceSettings).max_voices == 7
    assert settings.of(TextSettings) == TextSettings()


def test_an_extension_of_a_user_has_settings_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class HouseSettings(Strict):
        greeting: str = "Hello"

    package(monkeypatch, settings=HouseSettings)
    chosen = {"extensions": ["default", "house:EXTENSION"], "house": {"greeting": "Hi"}}
    settings = ApiSettings.model_validate(chosen)
    [kind] = [each.settings for each in load_extensions(settings.extensions) if each.name == "house"]
    assert settings.of(kind).greeting == "Hi"  # type: ignore[attr-defined]
    with pytest.raises(ValidationError, match="greetings"):
        ApiSettings.model_validate({**chosen, "house": {"greetings": "Hi"}})
