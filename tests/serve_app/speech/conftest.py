import pytest

from serve_app.speech import admission_control, speech_models
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(9.5)
    for module in (speech_models, admission_control):
        monkeypatch.setattr(module, "time", clock)
    return clock
