"""One server for all clients."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from serve_app.config import AdmissionSettings, ApiSettings, AppConfig
from tools.suites.application import running

if TYPE_CHECKING:
    from talkray_tools.recogniser import Recogniser, Whisper

os.environ.setdefault("LOGURU_LEVEL", "WARNING")  # without it Pipecat fills the output with its debugging
PATIENT = AdmissionSettings(max_line_s=100, max_wait_s=100, max_late_s=100)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Base URL. TALKRAY_CLIENTS_URL names a server that runs already."""
    if url := os.environ.get("TALKRAY_CLIENTS_URL"):
        yield url
        return
    config = AppConfig(model="embedded", api=ApiSettings(admission=PATIENT))
    with running(config) as url:
        yield url


@pytest.fixture(scope="session")
def transcriber() -> "Whisper":
    """Imported here: the recogniser is not installed for other tests."""
    from talkray_tools.recogniser import Whisper

    return Whisper()


@pytest.fixture(scope="session")
def ears(transcriber: "Whisper") -> "tuple[Recogniser, ...]":
    """Two, because each by itself completes words and sentences that are cut off, or hears others."""
    from talkray_tools.recogniser import Moonshine

    return transcriber, Moonshine()
