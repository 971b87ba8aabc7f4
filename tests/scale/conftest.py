"""Real Ray Serve whose pools grow and shrink: minutes, and both cores. `make scale` runs these tests."""

import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from serve_app.config import AppConfig
from tools.suites.application import running
from tools.suites.processes import MARK, marked


@contextlib.contextmanager
def server(config: AppConfig) -> Iterator[str]:
    """Base URL of an application of its own; no process of it is left behind."""
    run_id = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(MARK, run_id)
        with running(config) as url:
            yield url
    assert marked(run_id) == {}


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session
