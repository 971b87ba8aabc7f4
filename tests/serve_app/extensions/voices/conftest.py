from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from httpx import AsyncClient

from tests.serve_app.extensions.voices.speakers import Server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def server(folder: Path) -> Server:
    return Server(folder)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client
