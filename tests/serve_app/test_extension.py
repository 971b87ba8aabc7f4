"""Which extensions run: `api.extensions`."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from starlette.routing import compile_path

from deployments.errors import StartError
from serve_app.api.routes import dialects_of
from serve_app.api.speech_service import SpeechService
from serve_app.config import ApiSettings
from serve_app.extension import Dialect, Extension, Route, load_extensions
from serve_app.extensions import BUILT_IN
from tests.serve_app import asgi
from tests.serve_app.extensions.rows import POSTS
from tests.serve_app.fake import FakeSynthesizer, utterance
from tests.serve_app.one_model import client_for, client_of, one_api

pytestmark = pytest.mark.anyio
DOCUMENT = (Path(__file__).parents[2] / "docs" / "extensions.md").read_text()
ALL = {extension.name: extension for extension in load_extensions()}


async def answer(service: SpeechService) -> str:
    return "ours"


def package(monkeypatch: pytest.MonkeyPatch, operation: str = "GET /ours", **more: object) -> None:
    """A package of a user."""
    module = ModuleType("house")
    dialect = Dialect("House", routes=(Route(operation, answer, "Ours"),))
    module.EXTENSION = Extension(**{"name": "house", "dialects": (dialect,), **more})  # type: ignore[attr-defined, arg-type]
    module.OTHER = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "house", module)


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
        listed = (await client.get("/openapi.json")).json()["paths"]
        assert not [place for place in places if place.split()[0].lower() in listed.get(place.split()[1], {})]
        patterns = [compile_path(place.split()[1])[0] for place in places]
        for row in POSTS.values():
            if not any(pattern.match(row.path.partition("?")[0]) for pattern in patterns):
                assert (await client.post(row.path, json=row.body())).status_code == 200, row.path


@pytest.mark.parametrize(
    ("selected", "says"),
    [
        (("texts",), "'texts' is unknown. Use default, text, deepgram"),
        (("voices", "voices"), "'voices' is there twice"),
        (("default", "jobs"), "'jobs' is there twice"),
        (("dashscope",), "dashscope requires realtime: add them"),
        (("elevenlabs",), "elevenlabs requires voices, designs: add them"),
        (("nowhere.at_all:EXTENSION",), "cannot be imported (No module named 'nowhere')"),
        (("house:MISSING",), "cannot be imported (module 'house' has no attribute 'MISSING')"),
        (("house:OTHER",), "'house:OTHER' is a int: name an object of the class Extension"),
        (("house:",), "'house:' is unknown"),
    ],
)
def test_a_wrong_list_fails_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, selected: tuple[str, ...], says: str
) -> None:
    package(monkeypatch)
    with pytest.raises(StartError) as caught:
        load_extensions(selected)
    assert str(caught.value).startswith("api.extensions: ")
    assert says in str(caught.value)


async def test_an_extension_of_a_user_answers_beside_the_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch)
    settings = ApiSettings(extensions=("default", "house:EXTENSION"))
    async with client_for(FakeSynthesizer(), settings) as client:
        assert (await client.get("/ours")).json() == "ours"
        assert (await client.get("/v1/voices")).status_code == 200


async def test_the_example_of_the_document_works(monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)
    chosen, added = (yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", DOCUMENT, re.DOTALL | re.M))
    assert load_extensions(ApiSettings.model_validate(chosen["api"]).extensions)
    module = ModuleType("house")
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "house", module)
    async with client_for(FakeSynthesizer(script=utterance()), ApiSettings.model_validate(added["api"])) as client:
        answer = await client.get("/house/greeting", params={"name": "Ada"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/mpeg")


def test_the_document_names_each_and_what_it_requires() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*?)\|$", DOCUMENT, re.MULTILINE)
    told = {name: tuple(re.findall(r"`(\w+)`", required)) for name, required in rows}
    assert told.pop("default") == ()
    assert told == {name: extension.requires for name, extension in ALL.items()}


@pytest.mark.parametrize(
    ("operation", "more", "says"),
    [
        ("POST /v1/speak", {}, "deepgram and house both have POST /v1/speak"),
        ("GET /v1/audio/models", {}, "the core and house both have GET /v1/audio/models"),
        ("GET /ours", {"requires": ("magic",)}, "house requires magic"),
        ("GET /ours", {"name": "jobs"}, "'jobs' is there twice"),
    ],
)
def test_one_that_does_not_fit_fails(
    monkeypatch: pytest.MonkeyPatch, operation: str, more: dict[str, object], says: str
) -> None:
    package(monkeypatch, operation, **more)
    with pytest.raises(StartError) as caught:
        dialects_of(load_extensions(("default", "house:EXTENSION")))
    assert says in str(caught.value)
