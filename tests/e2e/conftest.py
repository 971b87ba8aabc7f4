"""One Ray with the whole application for all tests here."""

import uuid
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from deployments.config import CodecConfig, TalkerConfig
from serve_app.config import AdmissionSettings, ApiSettings, AppConfig
from tests.e2e.speech import Pools
from tools.suites.application import running
from tools.suites.processes import MARK, marked

TALKER = TalkerConfig(max_num_seqs=16, max_num_waiting=4)
# Tests fill the talker with more streams than two cores can speak in real time, and compare audio within 1 LSB whatever
# this CPU can do.
CODEC = CodecConfig(precision="float32")
PATIENT = AdmissionSettings(max_line_s=100, max_wait_s=100, max_late_s=100)


@pytest.fixture(scope="session")
def run_id() -> str:
    """Marks every process of the session's server."""
    return uuid.uuid4().hex


@pytest.fixture(scope="session")
def server(run_id: str) -> Iterator[str]:
    """Base URL of an application with the embedded model. No process of it outlives the session."""
    config = AppConfig(model="embedded", talker=TALKER, codec=CODEC, api=ApiSettings(admission=PATIENT))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(MARK, run_id)
        environment.setenv("RAY_metrics_report_interval_ms", "1000")  # ten times as often as by default
        with running(config) as url:
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
