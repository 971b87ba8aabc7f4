from collections.abc import AsyncIterator

import pytest

from serve_app.speech import room, speech_models
from serve_app.speech.live_text import LiveTexts
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(9.5)
    for module in (speech_models, room):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
async def texts() -> AsyncIterator[LiveTexts]:
    texts = LiveTexts()
    yield texts
    await texts.aclose()
