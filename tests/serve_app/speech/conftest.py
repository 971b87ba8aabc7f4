from collections.abc import AsyncIterator

import pytest

from serve_app.speech.live_text import LiveTexts


@pytest.fixture
async def texts() -> AsyncIterator[LiveTexts]:
    texts = LiveTexts()
    yield texts
    await texts.aclose()
