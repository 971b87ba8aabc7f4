from collections.abc import AsyncIterator

import pytest

from serve_app.extensions.live.live_text import LiveTexts
from tests.serve_app.speech.conftest import clock  # noqa: F401, a fixture


@pytest.fixture
async def texts() -> AsyncIterator[LiveTexts]:
    texts = LiveTexts()
    yield texts
    await texts.aclose()
