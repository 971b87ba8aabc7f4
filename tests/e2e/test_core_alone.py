"""A server without any extension: OpenAI's speech, models, health, metrics and keys."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from serve_app.audio.formats import AudioFormat
from serve_app.cli.key_file import create_key
from tests.e2e.black_box import ServerCommand, serving
from tests.e2e.speech import PATH, body, fetch
from tools.experiments.faults.polite import difference

pytestmark = pytest.mark.anyio
SETTINGS = "api: {extensions: []}\nmodel: embedded\ncodec: {precision: float32}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("core")


@pytest.fixture(scope="module")
def key(folder: Path) -> str:
    return create_key(folder / "keys.json", "ada")


@pytest.fixture(scope="module")
def core(folder: Path, key: str) -> Iterator[ServerCommand]:
    (folder / "core.yaml").write_text(SETTINGS)
    with serving(folder, "--config", "core.yaml", "--keys", "keys.json") as server:
        yield server


@pytest.fixture(scope="module")
async def client(core: ServerCommand, key: str) -> AsyncIterator[aiohttp.ClientSession]:
    headers, timeout = {"authorization": f"Bearer {key}"}, aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{core.port}", headers=headers, timeout=timeout) as session:
        yield session


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("audio_format", AudioFormat)
async def test_it_speaks(client: aiohttp.ClientSession, audio_format: AudioFormat, *, stream: bool) -> None:
    async with client.post(PATH, json=body(response_format=audio_format, stream=stream, seed=3)) as answer:
        assert answer.status == 200
        assert "x-ignored" not in answer.headers
        assert len(await answer.read()) > 1000


async def test_it_reads_the_english_of_its_voice(client: aiohttp.ClientSession) -> None:
    figures, words = [await fetch(client, body(text, seed=5)) for text in ("It costs $5.", "It costs five dollars.")]
    assert difference(figures, words) is None


async def test_what_it_offers(core: ServerCommand, client: aiohttp.ClientSession) -> None:
    assert f"open {core.url}/docs in a browser" in core.output
    for path, status in (
        ("/health", 200), ("/ready", 200), ("/v1/models", 200), ("/v1/audio/voices", 200), ("/metrics", 200),
        ("/docs", 200), ("/", 404), ("/status", 404), ("/v1/audio/jobs", 404), ("/v1/voices", 404),
    ):  # fmt: skip
        async with client.get(path) as answer:
            assert answer.status == status, path


async def test_its_metrics(client: aiohttp.ClientSession) -> None:
    text = ""
    async with asyncio.timeout(60):  # Ray reports them every ten seconds
        while "ray_talkray_" not in text:
            await asyncio.sleep(0.5)
            async with client.get("/metrics") as answer:
                text = await answer.text()


async def test_who_has_no_key_gets_nothing(client: aiohttp.ClientSession) -> None:
    async with client.post(PATH, json=body(), headers={"authorization": "Bearer none"}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (401, "invalid_api_key")
