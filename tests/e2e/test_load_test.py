"""The load test against the real server, over both transports."""

from pathlib import Path

import pytest

from loadtest.arrivals import FRAMES_PER_S, Arrivals, Phase, SpeechLengths
from loadtest.measure import measure
from loadtest.settings import Settings, Transport
from loadtest.traces import TraceFolder

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("transport", [Transport.HTTP, Transport.WEBSOCKET])
async def test_answers_have_the_planned_lengths(server: str, transport: Transport, tmp_path: Path) -> None:
    settings = Settings(
        server, (Phase("measured", 2.0, 1.5),), arrivals=Arrivals.CONSTANT, transport=transport,
        options={"model": "tts-1", "voice": "alloy", "leading_silence": True},
        lengths=SpeechLengths(1.0, 0.3),
    )  # fmt: skip
    result, whole = await measure(settings, TraceFolder(tmp_path / "run"), show=lambda _: None)
    assert whole
    assert (result.summary.sent, result.summary.succeeded) == (3, 3)
    asked = [request.frames for request in settings.schedule()]
    assert [round(trace.audio_s * FRAMES_PER_S) for trace in result.traces] == asked
