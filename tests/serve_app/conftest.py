import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, routing
from fastapi.dependencies.models import Dependant

from serve_app.config import ApiSettings
from tests.serve_app.fake import FakeSynthesizer, utterance
from tests.serve_app.one_model import client_of, one_api


@pytest.fixture(scope="session", autouse=True)
def _signatures_are_read_once() -> Iterator[None]:
    """By FastAPI, of all routes: half of the time of making an API, which tests do some thousand times."""
    known, read = dict[tuple[str, object], Dependant](), routing.get_dependant

    def get_dependant(*, path: str, call: Callable[..., Any], **how: Any) -> Dependant:
        function = call.func if isinstance(call, partial) else call
        key = path, getattr(function, "__code__", function)
        if key not in known:
            known[key] = read(path=path, call=call, **how)
        return replace(known[key], call=call, dependencies=[*known[key].dependencies])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(routing, "get_dependant", get_dependant)
        yield


@pytest.fixture
def synthesizer() -> FakeSynthesizer:
    return FakeSynthesizer(script=utterance())


@pytest.fixture
def api(synthesizer: FakeSynthesizer) -> FastAPI:
    return one_api(synthesizer, ApiSettings())


@pytest.fixture
async def client(api: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(api) as client:
        yield client


@pytest.fixture
def servers_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers of this test put their folders: a short path, as sockets need."""
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/XXX"], text=True).strip())
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)
