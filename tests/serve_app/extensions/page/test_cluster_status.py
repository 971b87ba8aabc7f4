"""The status of the cluster: counts of this replica, the notes of others, and who may read them."""

import json
import time

import pytest

from deployments.serving import metrics
from serve_app.config import AdmissionSettings, ApiSettings
from serve_app.extensions.page.cluster_status import ClusterStatus, PageState, Recent, summed
from serve_app.speech.speech_models import SpeechModel, SpeechModels
from tests.clock import Clock
from tests.serve_app.fake import FakeSynthesizer, utterance
from tests.serve_app.one_model import client_of, one_api

pytestmark = pytest.mark.anyio

NOW_S = 1_000_000_000.0
SPEECH = {"model": "tts-1", "input": "Hello.", "voice": "vivian", "response_format": "pcm"}


def test_times_to_first_audio_are_told_within_their_class() -> None:
    recent = Recent(Clock(NOW_S))
    for ms in range(10, 110):
        recent.count_first_audio(ms / 1000)
    told = summed([json.loads(recent.note())], now_s=NOW_S)["last_minute"]
    assert isinstance(told, dict)
    assert told["first_audio_ms"]["count"] == 100
    assert told["first_audio_ms"]["p50"] == pytest.approx(59, rel=0.04)
    assert told["first_audio_ms"]["p95"] == pytest.approx(104, rel=0.04)


def test_a_minute_and_a_quarter_of_an_hour_pass() -> None:
    clock = Clock(NOW_S)
    recent = Recent(clock)
    for after_s, minute, quarter in ((0, 1, 1), (50, 1, 1), (75, 0, 1), (880, 0, 1), (920, 0, 0)):
        clock.now_s = NOW_S
        if after_s == 0:
            recent.count_first_audio(0.1)
        clock.now_s = NOW_S + after_s
        told = summed([json.loads(recent.note())], now_s=clock.now_s)
        counts = [told[part]["first_audio_ms"]["count"] for part in ("last_minute", "last_quarter_hour")]  # type: ignore[index]
        assert counts == [minute, quarter], after_s
        assert len(told["slices"]) == 60  # type: ignore[arg-type]


def test_replicas_are_added_up_and_those_that_have_ended_left_out() -> None:
    clock = Clock(NOW_S)
    own, other, ended = Recent(clock), Recent(clock), Recent(clock)
    for recent in (own, other, ended):
        recent.count_first_audio(0.2)
    left = [other.note(), ended.note().replace(str(NOW_S).encode(), str(NOW_S - 100).encode())]
    told = ClusterStatus(own, lambda: {"talker base": (2, 1)}, lambda: left).read()
    assert told["ingresses_heard"] == 2
    assert told["last_minute"]["first_audio_ms"]["count"] == 2  # type: ignore[index]
    assert told["pools"] == {"talker base": {"wanted": 2, "running": 1}}


async def test_what_the_metrics_record_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for instrument in (metrics.TTFA, metrics.REFUSALS, metrics.ENDINGS, metrics.UNDERRUNS, metrics.AUDIO):
        monkeypatch.setattr(instrument, "record", instrument.record)  # as it was, after the test
    settings, speaker = ApiSettings(admission=AdmissionSettings(max_streams=1)), FakeSynthesizer(script=utterance())
    recent = Recent(time.time, SpeechModels({"": SpeechModel(speaker, settings.admission)}))
    recent.follow()
    api = one_api(speaker, settings, opened={"page": PageState((), ClusterStatus(recent))})
    async with client_of(api) as client:
        assert (await client.post("/v1/audio/speech", json=SPEECH)).status_code == 200
        metrics.REFUSALS.record(1, reason="line")
        told = (await client.get("/status")).json()
    assert told["models"] == {"model": {"state": "ready"}}
    assert told["streams"] == {"speaking": 0, "waiting": 0, "most": 1}
    minute = told["last_minute"]
    assert (minute["first_audio_ms"]["count"], minute["refused"], minute["streams_ended"]) == (1, {"line": 1}, 1)
    assert minute["audio_s"] == pytest.approx(0.3)
