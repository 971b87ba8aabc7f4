"""The page in Chromium against the API with speech of a script: quick, and part of `make test` where a browser is."""

import asyncio
import re
import string
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from deployments.errors import NotReady
from deployments.protocol import ModelInfo
from loadtest.report import Report, write_report
from loadtest.sweep import Sweep
from serve_app.api.application import OWN_TAGS
from serve_app.api.bounded_websocket import BoundedWebSocket
from serve_app.cli.key_file import create_key
from serve_app.cli.ray_settings import free_port
from serve_app.config import AccessSettings, AdmissionSettings, ApiSettings
from serve_app.distribution import version
from serve_app.extension import Node
from serve_app.extensions.live.live_text import LiveTexts
from serve_app.extensions.page import web_pages
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.speech.model_state import ModelState, ModelStatus, ready
from tests.loadtest.test_report import run
from tests.loadtest.test_sweep import PLAN, step
from tests.serve_app import fake
from tests.serve_app.extensions.page.browsers import IS_READY, ROOT, seen_in, starting, told
from tests.serve_app.extensions.voices.speakers import spoken
from tests.serve_app.one_model import one_api
from tests.test_docs_commands import blocks

Json = dict[str, Any]
PAGES = Path(web_pages.__file__).parent / "pages"

pytestmark = pytest.mark.skipif(not IS_READY, reason="no Chromium, Node or .pages: make page installs them")


@contextmanager
def serving(app: ASGIApp, port: int | None = None) -> Iterator[str]:
    """`app` on a thread of its own."""
    port = port or free_port()
    protocol = partial(BoundedWebSocket, trusted_proxies=1)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, log_level="error", ws=protocol, lifespan="off", proxy_headers=False
    )
    server, is_up = uvicorn.Server(config), threading.Event()
    started = server.startup

    async def startup(sockets: object = None) -> None:
        await started(sockets)  # type: ignore[arg-type]
        is_up.set()

    server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        assert is_up.wait(30)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(30)


def speaking(info: ModelInfo = fake.FOLLOWED, settings: ApiSettings | None = None, *, frames: int = 0) -> ASGIApp:
    script = fake.utterance(frames) if frames else fake.followed()
    sizes = {"talker": (1, 1), "codec": (2, 1)}
    node = Node(lambda model: True, lambda: True, lambda: b"", sizes=lambda: sizes)
    return one_api(
        fake.FakeSynthesizer(info, script), settings or ApiSettings(), node=node, opened={"live": LiveTexts()}
    )


def test_speech_is_heard_split_and_saved() -> None:
    with serving(speaking(frames=120)) as url:
        seen = seen_in("chromium", "stop", f"{url}/", text=fake.FOLLOWED_TEXT)
    assert seen["state"].startswith("Stopped.")
    assert seen["silentAfterMs"] < 150


def test_the_program_for_a_browser_in_the_documents_plays_what_is_spoken() -> None:
    [program] = [block.text for block in blocks(ROOT / "docs" / "websocket.md") if block.language == "js"]
    with serving(speaking()) as url:
        code = program.replace("ws://127.0.0.1:8000", url.replace("http", "ws"))
        seen = seen_in("chromium", "program", f"{url}/", code=code)
    assert (seen["types"], seen["loudest"] > 0.05) == (["started", "done"], True)
    pieces = seen["pieces"]  # each begins where the last one has ended, or later
    assert sum(length for _, length in pieces) == pytest.approx(
        len(fake.pcm_of(fake.followed())) / 2 / fake.FOLLOWED.sample_rate
    )
    assert all(begin > last + length - 1e-6 for (last, length), (begin, _) in pairwise(pieces))


@pytest.mark.parametrize(("width", "dark"), [(360, True), pytest.param(1100, False, marks=pytest.mark.page)])
def test_axe_finds_nothing_and_the_page_is_not_wider_than_the_window(width: int, dark: bool) -> None:
    with serving(speaking()) as url:
        seen = seen_in("chromium", "access", f"{url}/", width=width, dark=dark)
    assert (seen["found"], seen["wide"], seen["back"]) == ([], [], "tab-speak")
    assert seen["controls"] > 40


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.page)])
def test_the_layout_of_each_tab(width: int) -> None:
    with serving(speaking()) as url:
        seen = seen_in("chromium", "layout", f"{url}/", width=width, worklet=str(PAGES / "worklet.js"))
    for name, tab in seen["tabs"].items():
        assert (tab["uneven"], tab["narrow"]) == ([], []), name
        assert all(label[0] not in string.ascii_lowercase or label.startswith("p95") for label in tab["tiles"]), name
    assert [len(tab["tiles"]) for tab in seen["tabs"].values()] == [6, 0, 0, 0, 8]
    assert seen["tabs"]["converse"]["primary"] == ["write"]
    assert (seen["columns"], seen["options"] % seen["columns"]) == (4 if width > 800 else 2, 0)
    assert seen["together"]
    assert (seen["filled"] > 0.95) == (width < 800)
    assert len({text for text, _ in seen["examples"]}) == len(seen["examples"]) == 3
    assert [bool(instruction) for _, instruction in seen["examples"]] == [False, True, False]
    assert "0 s at 4" in seen["drawn"]["strip"]  # the y axis
    assert "0 ms at 4" in seen["drawn"]["trend"]
    assert seen["begins"] == [0.16, 0.08]  # smooth, then immediate, of pieces of 80 ms
    assert set(seen["pools"]) == {"ready", "starting"}
    assert seen["footer"].startswith(f"Talkray {version()} · API reference")
    assert seen["icon"] == "data:image/svg+xml,"


def test_what_was_typed_outlives_a_reload_and_a_new_endpoint() -> None:
    fields = {
        "text": "Not yet spoken.", "instructions": "slowly", "seed": "7", "temperature": "0.5", "speed": "1.5",
        "live": "half a", "chat-text": "Who?", "chat-url": "http://localhost:1/v1", "clone-name": "ada",
        "clone-text": "Said.", "sample": "", "design-words": "old",
    }  # fmt: skip
    with serving(speaking()) as url:
        seen = seen_in("chromium", "typed", f"{url}/", fields=fields, unkept={"chat-key": "secret"})
    *kept, key = seen["reloaded"][0]
    assert (kept, key, *seen["reloaded"][1:]) == ([*fields.values()], "", "1.5×", False)
    assert seen["used"][0][:-1] == [*fields.values()]
    assert (seen["before"], seen["used"][2]) == (False, True)


ERRORS: list[tuple[Json, str, Json | None]] = [  # fields, which one is marked, and what "Try anyway" sends
    ({"text": "Как тебя зовут, и что ты делаешь?"}, "text", {"any_language": True}),
    ({"text": "<!-- later -->"}, "text", {"markup": "none"}),
    ({"text": "Hello.", "temperature": "-1"}, "temperature", None),
    ({"text": "Hello.", "seed": "-1"}, "seed", None),
]


def test_an_error_is_told_once_and_offers_what_the_server_names() -> None:
    with serving(speaking()) as url:
        process = starting("errors", "chromium", f"{url}/", {"cases": [fields for fields, _, _ in ERRORS]})
        seen = told(process)["seen"]
    for case, (_, marked, sent) in zip(seen, ERRORS, strict=True):
        assert (case["times"], case["notes"], case["marked"], case["offers"]) == (1, "", [marked], sent is not None)
        if sent is not None:
            assert sent.items() <= case["sent"][-1].items()
            assert case["left"] == 0


def test_text_that_is_not_read_aloud_is_struck_out() -> None:
    texts = {
        "# One **two** [three](https://x.y) 😀😀 four": ["#", "**", "**", "[", "](https://x.y)", "😀😀"],
        "  😀 `five` <b>six</b>": ["😀", "`", "`", "<b>", "</b>"],
        "Seven 2 * 3, eight.": [],
    }
    with serving(speaking()) as url:
        seen = seen_in("chromium", "struck", f"{url}/", texts=[*texts])
    assert seen["struck"] == [*texts.values()]
    assert seen["shown"] == [*texts][-1]


def test_a_clone_on_a_server_that_cannot_clone_is_not_offered(tmp_path: Path) -> None:
    recording = tmp_path / "ada.wav"
    recording.write_bytes(spoken())
    settings = ApiSettings(voices=VoiceSettings(store=str(tmp_path / "voices")))
    with serving(speaking(replace(fake.FOLLOWED, name="embedded", voices=("nora", "felix")), settings)) as url:
        seen = seen_in("chromium", "stored", f"{url}/", recording=str(recording))
    assert (seen["open"], seen["stillOpen"]) == ([False, False], True)
    assert all(seen["off"])
    assert len(seen["off"]) == 4
    assert all("--model embedded-base" in seen[name] for name in ("state", "about"))
    assert (seen["about"] + seen["list"]).lower().count("demo") == 1
    assert seen["gaps"][1] > 2 * seen["gaps"][0]


def test_docs_open_our_routes_first_and_close_those_of_other_services() -> None:
    with serving(speaking()) as url:
        seen = seen_in("chromium", "docs", f"{url}/")
    tags = dict(seen["tags"])
    assert [*tags][: len(OWN_TAGS)] == [*OWN_TAGS]
    assert all(tags.values()) is False
    assert {tag for tag, is_open in tags.items() if is_open} == set(OWN_TAGS)
    assert {"ElevenLabs", "Cartesia", "Deepgram"} <= tags.keys() - set(OWN_TAGS)
    assert "/v1/audio/speech/ws" in seen["about"]


@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.page)])
def test_a_load_report_shows_eight_columns_and_the_others_when_asked(width: int, tmp_path: Path) -> None:
    page = write_report(Report((Sweep("a", PLAN, (step(1.0, 1.0),)),), (run("one"), run("two"))), tmp_path)
    seen = seen_in("chromium", "report", page.as_uri(), width=width)
    shown = 8 if width > 700 else 0  # a phone has cards instead of headings
    assert set(seen["before"]) == {shown}
    assert not seen["wide"]
    assert min(seen["after"]) >= (19 if shown else 0)


@pytest.mark.parametrize("wait", [False, pytest.param(True, marks=pytest.mark.page)])
def test_a_refusal_counts_down_until_it_is_stopped_or_speech_follows(wait: bool) -> None:
    settings = ApiSettings(admission=AdmissionSettings(client_requests_per_minute=2))
    with serving(speaking(settings=settings)) as url:
        seen = told(starting("refusal", "chromium", f"{url}/", {"wait": wait}))
    assert re.search(r"Trying again in \d+ s\.", seen["refused"])


@pytest.mark.page
def test_a_server_that_is_gone_and_comes_back_under_a_path_prefix() -> None:
    port = free_port()
    with serving(Starlette(routes=[Mount("/of/talkray", speaking())]), port) as url:
        process = starting("gone", "chromium", f"{url}/of/talkray/", {})
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "gone\n"
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "back\n"
    with serving(Starlette(routes=[Mount("/of/talkray", speaking())]), port):
        seen = told(process)
    assert "cannot be reached" in seen["refused"]


class Loading(fake.FakeSynthesizer):
    """A model that is described once it has loaded."""

    has_loaded = False

    async def describe(self) -> ModelInfo:
        if not self.has_loaded:
            raise NotReady("the model is still loading")
        return await super().describe()


@pytest.mark.page
def test_a_model_that_loads_shows_how_far_it_is() -> None:
    synthesizer = Loading(fake.FOLLOWED, fake.followed())

    def state(model: str) -> ModelState:
        return ready() if synthesizer.has_loaded else ModelState(ModelStatus.LOADING, "compiling", 42, 9.0)

    def has_loaded() -> bool:
        return synthesizer.has_loaded

    node = Node(lambda model: has_loaded(), has_loaded, lambda: b"", state=state)
    with serving(one_api(synthesizer, ApiSettings(), node=node)) as url:
        process = starting("loading", "chromium", f"{url}/", {})
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        synthesizer.has_loaded = True
        seen = told(process)
    assert seen["about"] == "The model is loading, 42 %, compiling"
    assert "loading" not in seen["then"]


@pytest.mark.page
@pytest.mark.parametrize(("info", "label", "state", "about"), [
    (fake.BASE, "Instruction", "ref_audio", "Store a recording under Voices first"),
    (fake.VOICE_DESIGN, "Voice description", "of audio", "design"),
])  # fmt: skip
def test_a_model_without_named_voices(info: ModelInfo, label: str, state: str, about: str) -> None:
    with serving(speaking(info)) as url:
        process = starting("kinds", "chromium", f"{url}/", {})
        seen = told(process)
    assert (seen["hidden"], seen["label"]) == (True, label)
    assert state in seen["state"]
    assert about in seen["about"]


def test_with_keys(tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys.json", "ada")
    with serving(speaking(settings=ApiSettings(access=AccessSettings(keys_file=tmp_path / "keys.json")))) as url:
        seen = told(starting("keys", "chromium", f"{url}/", {"key": key}))
    assert "API key" in seen["before"]
    own, credential = seen["offered"]
    assert (own, credential.startswith("openai-insecure-api-key.ek_")) == ("talkray", True)
    assert "$TALKRAY_API_KEY" in seen["program"]
    assert seen["held"] == 2
    assert len(seen["lines"]) == len(set(seen["lines"])) > 0
    assert seen["lines"] != [""]
    assert (len(set(seen["lines"])), seen["stored"]) == (len(seen["lines"]), None)
