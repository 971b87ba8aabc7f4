"""The page in Chromium against the API with speech of a script: quick, and part of `make test` where a browser is."""

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from deployments.errors import NotReady
from deployments.protocol import ModelInfo
from serve_app.api.access.keys import create_key
from serve_app.api.cluster_status import ClusterStatus, Recent
from serve_app.api.routes import Node
from serve_app.api.transport.bounded_websocket import BoundedWebSocket
from serve_app.cli.ray_settings import free_port
from serve_app.config import AccessSettings, AdmissionSettings, ApiSettings
from serve_app.speech.live_text import LiveTexts
from serve_app.speech.model_state import ModelState, ModelStatus, ready
from tests.pages.browsers import IS_READY, seen_in, starting, told
from tests.serve_app.fake import BASE, FOLLOWED, FOLLOWED_TEXT, VOICE_DESIGN, FakeSynthesizer, followed, utterance
from tests.serve_app.one_model import one_api

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


def speaking(info: ModelInfo = FOLLOWED, settings: ApiSettings | None = None, *, frames: int = 0) -> ASGIApp:
    script = utterance(frames) if frames else followed()
    node = Node(lambda model: True, lambda: True, lambda: b"", status=ClusterStatus(Recent(time.time)))
    return one_api(FakeSynthesizer(info, script), settings or ApiSettings(), node=node, live_texts=LiveTexts())


def test_speech_is_heard_split_and_saved() -> None:
    with serving(speaking(frames=120)) as url:
        seen = seen_in("chromium", "stop", f"{url}/", text=FOLLOWED_TEXT)
    assert seen["state"].startswith("Stopped.")
    assert seen["silentAfterMs"] < 150


@pytest.mark.parametrize(("width", "dark"), [(360, True), pytest.param(1100, False, marks=pytest.mark.page)])
def test_axe_finds_nothing_and_the_page_is_not_wider_than_the_window(width: int, dark: bool) -> None:
    with serving(speaking()) as url:
        seen = seen_in("chromium", "access", f"{url}/", width=width, dark=dark)
    assert (seen["found"], seen["wide"], seen["back"]) == ([], [], "tab-speak")
    assert seen["controls"] > 40


@pytest.mark.parametrize("wait", [False, pytest.param(True, marks=pytest.mark.page)])
def test_a_refusal_counts_down_until_it_is_stopped_or_speech_follows(wait: bool) -> None:
    settings = ApiSettings(admission=AdmissionSettings(client_requests_per_minute=2))
    with serving(speaking(settings=settings)) as url:
        seen = told(starting("refusal", "chromium", f"{url}/", {"wait": wait}))
    assert re.search(r"Asking again in \d+ s\.", seen["refused"])


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


class Loading(FakeSynthesizer):
    """A model that is described once it has loaded."""

    has_loaded = False

    async def describe(self) -> ModelInfo:
        if not self.has_loaded:
            raise NotReady("the model is still loading")
        return await super().describe()


@pytest.mark.page
def test_a_model_that_loads_shows_how_far_it_is() -> None:
    synthesizer = Loading(FOLLOWED, followed())

    def state(model: str) -> ModelState:
        return ready() if synthesizer.has_loaded else ModelState(ModelStatus.LOADING, "compiling", 42, 9.0)

    def has_loaded() -> bool:
        return synthesizer.has_loaded

    node = Node(
        lambda model: has_loaded(), has_loaded, lambda: b"", state=state, status=ClusterStatus(Recent(time.time))
    )
    with serving(one_api(synthesizer, ApiSettings(), node=node)) as url:
        process = starting("loading", "chromium", f"{url}/", {})
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        synthesizer.has_loaded = True
        seen = told(process)
    assert seen["about"] == "The model is loading, 42 %, compiling"
    assert "loading" not in seen["then"]


@pytest.mark.page
@pytest.mark.parametrize(
    ("info", "label", "state", "about"),
    [
        (BASE, "Instruction", "ref_audio", "clone one under Voices first"),
        (VOICE_DESIGN, "The voice, in words", "in all", "design"),
    ],
)
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
    assert "$TALKRAY_API_KEY" in seen["program"]
    assert seen["held"] == 2
    assert len(seen["lines"]) == len(set(seen["lines"])) > 0
    assert seen["lines"] != [""]
    assert len(set(seen["lines"])) == len(seen["lines"])
    assert seen["stored"] is None
