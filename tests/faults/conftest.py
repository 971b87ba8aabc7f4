"""Two replicas of each pool on two cores, and what the streams are without faults."""

from collections.abc import Iterator

import pytest

from tools.suites.listening import Heard, Speaking, long_requests, requests
from tools.suites.pools import CODEC, TALKER, Service, config, serving, tiny_model

AT_ONCE = 20
STREAMS = requests(17, frames=50) + long_requests(3, frames=20)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(config(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))) as service:
        yield service


@pytest.fixture(scope="session")
def undisturbed(service: Service) -> list[Heard]:
    """Every stream as it is without a fault."""
    heard = Speaking(STREAMS, at_once=AT_ONCE).finish()
    assert [each.error for each in heard] == [None] * len(STREAMS)
    return heard


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> None:
    """Both pools are whole before a test."""
    if "service" in request.fixturenames:
        service = request.getfixturevalue("service")
        for pool in (TALKER, CODEC):
            service.wait_for(pool, 2)
