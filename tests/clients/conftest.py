"""One server for all clients."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from serve_app.cli.ray_settings import free_port
from serve_app.cli.serve.local_server import Address, running
from serve_app.config import AdmissionSettings, ApiSettings, AppConfig

if TYPE_CHECKING:
    from tools.listening.recogniser import Whisper

PATIENT = AdmissionSettings(max_line_s=100, max_wait_s=100, max_late_s=100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Base URL. TALKRAY_CLIENTS_URL names a server that runs already."""
    if url := os.environ.get("TALKRAY_CLIENTS_URL"):
        yield url
        return
    config = AppConfig(model="embedded", api=ApiSettings(admission=PATIENT))
    with running(config, Address("127.0.0.1", free_port()), print) as url:
        yield url


@pytest.fixture(scope="session")
def transcriber() -> "Whisper":
    """Imported here: the recogniser is not installed for other tests."""
    from tools.listening.recogniser import Whisper

    return Whisper()
