"""Real Ray Serve whose pools grow and shrink: minutes, and both cores. `make scale` runs these tests."""

import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from serve_app.cli.ray_settings import free_port
from serve_app.cli.serve.local_server import Address, running
from serve_app.config import AppConfig
from tests.e2e.processes import MARK, marked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.scale)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@contextlib.contextmanager
def server(config: AppConfig) -> Iterator[str]:
    """Base URL of an application of its own; no process of it is left behind."""
    run_id = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(MARK, run_id)
        with running(config, Address("127.0.0.1", free_port()), print) as url:
            yield url
    assert marked(run_id) == {}


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session
