"""Whose voice is heard: a recording's, sent with a request or stored, through the embedded voice that clones."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from serve_app.api.headers import IGNORED_HEADER
from talkray_tools.recogniser import Moonshine, plain_words, word_errors
from tests.e2e.commands.conftest import BOUND_S, Guarded, bearer
from tests.e2e.heard import Samples

RATE = 24000
TEXT = "The boat drifted on the lake."
RECORDED = "He had never grown accustomed to the monotony of his work."
BY_RECORDING = {"model": "embedded-base", "language": "english", "response_format": "pcm", "seed": 5}
SPEAKERS = ("otto", "hugo", "lily")  # deep, middle and high: 100, 166 and 273 Hz
MOST_ERRORS = 1  # of six words


@pytest.fixture(scope="module")
def client(guarded: Guarded) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=BOUND_S, headers=bearer(guarded.key)) as client:
        yield client


@pytest.fixture(scope="module")
def recordings(client: httpx.Client) -> dict[str, bytes]:
    return {
        speaker: speak(client, model="embedded", voice=speaker, input=RECORDED, response_format="wav")
        for speaker in SPEAKERS
    }


def speak(client: httpx.Client, **fields: Any) -> bytes:
    answer = client.post("/v1/audio/speech", json={"input": TEXT, **BY_RECORDING, **fields})
    assert answer.status_code == 200, answer.text
    return answer.content


def pitch_hz(samples: Samples) -> float:
    """The median of voiced pieces of 40 ms, by autocorrelation from 70 to 400 Hz."""
    size, found = RATE // 25, []
    for begin in range(0, len(samples) - size, size // 2):
        piece = samples[begin : begin + size].astype(float)
        if piece.std() < 500:
            continue
        spectrum = np.abs(np.fft.rfft(piece - piece.mean(), 2 * size)) ** 2
        alike = np.fft.irfft(spectrum)[: RATE // 70]
        lag = RATE // 400 + int(np.argmax(alike[RATE // 400 :]))
        if alike[lag] > 0.5 * alike[0]:
            found.append(RATE / lag)
    return float(np.median(found))


def nearest(recordings: dict[str, bytes], spoken: bytes) -> str:
    """The speaker of the recording whose pitch is nearest to that of what was spoken."""
    pitch = pitch_hz(np.frombuffer(spoken, "<i2"))
    pitches = {
        name: pitch_hz(soundfile.read(io.BytesIO(recording), dtype="int16")[0])
        for name, recording in recordings.items()
    }
    return min(pitches, key=lambda name: abs(np.log(pitches[name] / pitch)))


def is_same(spoken: bytes, again: bytes) -> bool:
    """Whether two answers hold the same codes: calls of other sizes round a sample otherwise."""
    if len(spoken) != len(again):
        return False
    differences = np.frombuffer(spoken, "<i2").astype(int) - np.frombuffer(again, "<i2")
    return bool(np.abs(differences).max() <= 2)


def test_a_recording_that_is_sent_gives_the_voice(client: httpx.Client, recordings: dict[str, bytes]) -> None:
    recogniser = Moonshine()
    for speaker, recording in recordings.items():
        sent = base64.b64encode(recording).decode()
        spoken = speak(client, ref_audio=sent)
        assert nearest(recordings, spoken) == speaker
        heard = recogniser.transcribe(np.frombuffer(spoken, "<i2").astype(np.float32) / 32768, RATE)
        assert word_errors(plain_words(TEXT), plain_words(heard)) <= MOST_ERRORS, heard


def test_a_stored_voice_is_the_recordings(client: httpx.Client, recordings: dict[str, bytes]) -> None:
    file = {"audio_sample": ("otto.wav", recordings["otto"], "audio/wav")}
    answer = client.post("/v1/audio/voices", data={"name": "grandpa", "prepare": "auto"}, files=file)
    assert answer.status_code == 200, answer.text
    try:
        spoken = speak(client, voice="grandpa")
        assert nearest(recordings, spoken) == "otto"
        assert is_same(spoken, speak(client, voice="grandpa"))
    finally:
        assert client.delete(f"/v1/audio/voices/{answer.json()['id']}").status_code == 200


def test_what_a_recording_says_has_no_effect(client: httpx.Client, recordings: dict[str, bytes]) -> None:
    sent = base64.b64encode(recordings["hugo"]).decode()
    fields = {"input": TEXT, "ref_audio": sent, "ref_text": RECORDED}
    answer = client.post("/v1/audio/speech", json={**BY_RECORDING, **fields})
    assert answer.status_code == 200, answer.text
    assert "ref_text" in answer.headers[IGNORED_HEADER]
    assert is_same(answer.content, speak(client, ref_audio=sent))
