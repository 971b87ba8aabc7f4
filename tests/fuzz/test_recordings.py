import base64
import gc
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from deployments.errors import InvalidRequest
from serve_app.audio import recordings
from serve_app.audio.recordings import decode_reference
from serve_app.config import ApiSettings
from tests.fuzz.conftest import Cases
from tests.fuzz.recordings import RATE, mutated, originals
from tests.fuzz.test_texts import SPEECH, check
from tests.serve_app.asgi import post
from tests.serve_app.fake import BASE, FakeSynthesizer, utterance
from tests.serve_app.one_model import one_api


@pytest.fixture(autouse=True)
def few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_SECONDS", 3.0)


def data_url(data: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(data).decode()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_every_original_is_decoded() -> None:
    for data in originals():
        assert decode_reference(data_url(data), RATE).size == pytest.approx(RATE * 0.6, rel=0.2)


def test_harmed_recordings(cases: Cases) -> None:
    """Audio within the limits, or the client's error; memory and files do not pile up."""
    files = open_files()
    before = resident_bytes()
    for chance in cases:
        try:
            audio = decode_reference(data_url(mutated(chance)), RATE)
        except InvalidRequest:
            cases.count("refused")
            continue
        assert audio.dtype == np.float32
        assert np.isfinite(audio).all()
        assert 0.4 * RATE < audio.size < 3.2 * RATE
        cases.count("decoded")
    gc.collect()
    assert open_files() == files
    assert resident_bytes() - before < 256 << 20


@pytest.mark.anyio
async def test_harmed_recordings_in_requests(cases: Cases) -> None:
    synthesizer = FakeSynthesizer(BASE, utterance(1))
    api = one_api(synthesizer, ApiSettings())
    for number, chance in enumerate(cases):
        if number % 20:  # the way through the API is the same for all
            continue
        synthesizer.requests.clear()
        fields = {"input": "Hello", "ref_text": "Hi", "ref_audio": data_url(mutated(chance)), "response_format": "pcm"}
        answer = await post(api, SPEECH, json.dumps(fields).encode())
        check(answer)
        cases.count(answer.status)
    assert sum(thread.name.startswith("reference-audio") for thread in threading.enumerate()) <= 2
