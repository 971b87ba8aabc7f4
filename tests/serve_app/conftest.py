import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from serve_app.config import ApiSettings
from tests.serve_app.fake import FakeSynthesizer, utterance
from tests.serve_app.one_model import one_api


@pytest.fixture
def synthesizer() -> FakeSynthesizer:
    return FakeSynthesizer(script=utterance())


@pytest.fixture
def api(synthesizer: FakeSynthesizer) -> FastAPI:
    return one_api(synthesizer, ApiSettings())


@pytest.fixture
async def client(api: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://talkray") as client:
        yield client


@pytest.fixture
def servers_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers of this test put their folders: a short path, as sockets need."""
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/XXX"], text=True).strip())
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)
