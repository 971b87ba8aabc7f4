from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from httpx import AsyncClient

from tests.serve_app.extensions.jobs.desk import Server, Speaker, serving


@pytest.fixture
def speaker() -> Speaker:
    return Speaker()


@pytest.fixture
async def server(tmp_path: Path, speaker: Speaker) -> AsyncIterator[Server]:
    async with serving(tmp_path, speaker) as (server, _):
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client
