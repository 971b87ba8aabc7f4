"""One Ray with the whole application for all tests here."""

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from deployments.config import CodecConfig, TalkerConfig
from serve_app.cli.ray_settings import free_port
from serve_app.cli.serve.local_server import Address, running
from serve_app.config import AdmissionSettings, ApiSettings, AppConfig
from tests.e2e.processes import MARK, marked
from tests.e2e.speech import Pools

TALKER = TalkerConfig(max_num_seqs=16, max_num_waiting=4)
# Tests fill the talker with more streams than two cores can speak in real time, and compare audio within 1 LSB whatever
# this CPU can do.
CODEC = CodecConfig(precision="float32", max_late_s=1000)
PATIENT = AdmissionSettings(max_line_s=100, max_wait_s=100, max_late_s=100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def run_id() -> str:
    """Marks every process of the session's server."""
    return uuid.uuid4().hex


@pytest.fixture(scope="session")
def server(run_id: str) -> Iterator[str]:
    """Base URL of an application with the embedded model. No process of it outlives the session."""
    config = AppConfig(model="embedded", talker=TALKER, codec=CODEC, api=ApiSettings(admission=PATIENT))
    address = Address("127.0.0.1", free_port())
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(MARK, run_id)
        with running(config, address, print) as url:
            yield url
    assert marked(run_id) == {}


@pytest.fixture(scope="session")
async def http(server: str) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server, connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


@pytest.fixture(scope="session")
async def pools(http: aiohttp.ClientSession) -> Pools:
    return Pools()
