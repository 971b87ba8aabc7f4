"""Three kinds of checkpoint behind one address: each request is answered by the model that it is for."""

import asyncio
import base64
import io
import os
import signal
import time
import wave
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from serve_app.api.access.callers import EVERYBODY, VISITOR
from serve_app.extensions.voices.extension import open_voices
from serve_app.extensions.voices.settings import VoiceSettings
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from tests.e2e.black_box import ServerCommand, serving

BOUND_S = 120
KINDS = ("CustomVoice", "Base", "VoiceDesign")
FRAMES = 5
SHORT = {"input": "Hello there.", "response_format": "pcm", "max_new_tokens": FRAMES + 1, "ignore_eos": True, "seed": 1}
LEADING = {"leading_silence": True}


def recording() -> str:
    tone = (np.sin(np.arange(24_000) * 0.05) * 9000).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(24_000)
        audio.writeframes(tone.tobytes())
    return base64.b64encode(file.getvalue()).decode()


VOICE: dict[str, Any] = {"voice": "vivian"}
CLONE: dict[str, Any] = {"ref_audio": recording(), "ref_text": "A tone."}
DESIGN: dict[str, Any] = {"instructions": "A calm voice."}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerCommand]:
    folder = tmp_path_factory.mktemp("several")
    for kind in KINDS:
        write_checkpoint(folder / kind, SHAPES[f"tiny-{kind}"], Options(dtype=torch.float32))
    options = [argument for kind in KINDS for argument in ("--model", str(folder / kind))]
    data = {"TALKRAY_DATA": os.environ["TALKRAY_DATA"]}  # a test looks for stored voices there
    with serving(folder, *options, environment=data) as server:
        yield server


@pytest.fixture(scope="module")
def client(several: ServerCommand) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=several.url, timeout=BOUND_S) as client:
        yield client


def speak(client: httpx.Client, **fields: Any) -> bytes:
    answer = client.post("/v1/audio/speech", json={**SHORT, **LEADING, **fields})
    assert answer.status_code == 200, answer.text
    assert len(answer.content) == FRAMES * 1920 * 2
    return answer.content


def test_each_request_is_answered_by_its_model(client: httpx.Client) -> None:
    """Checkpoints of one seed share weights, so that the requests differ in more than their model."""
    by_name = {
        kind: speak(client, model=kind, **fields)
        for kind, fields in (("CustomVoice", VOICE), ("Base", CLONE), ("VoiceDesign", DESIGN))
    }
    assert len(set(by_name.values())) == 3
    for kind, fields in (
        ("CustomVoice", {"model": "tts-1", **VOICE}), ("Base", {"model": "tts-1", **CLONE}),
        ("Base", {"model": "qwen3-tts-clone", **CLONE}), ("Base", {**CLONE, "voice": "alloy"}),
        ("VoiceDesign", DESIGN),
        ("VoiceDesign", {"task_type": "VoiceDesign", **DESIGN, "voice": "vivian"}),
        ("CustomVoice", {**VOICE, "instructions": ""}),
    ):  # fmt: skip
        same_but_for_a_rounding(speak(client, **fields), by_name[kind])


def test_a_stored_voice_is_spoken_by_the_model_that_clones_until_it_is_deleted(client: httpx.Client) -> None:
    fields, file = {"name": "tone", "ref_text": CLONE["ref_text"]}, base64.b64decode(CLONE["ref_audio"])
    stored = client.post("/v1/audio/voices", data=fields, files={"audio_sample": ("tone.wav", file)})
    assert stored.status_code == 200, stored.text
    same_but_for_a_rounding(speak(client, voice="tone"), speak(client, model="Base", **CLONE))
    deleted = client.delete(f"/v1/audio/voices/{stored.json()['id']}")
    assert deleted.status_code == 200, deleted.text
    refused = client.post("/v1/audio/speech", json={**SHORT, "voice": "tone"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "voice")


def heard(candidate: dict[str, str]) -> bytes:
    return base64.b64decode(candidate["audio"])[44:]


def same_but_for_a_rounding(pcm: bytes, other: bytes) -> None:
    """What is decoded beside others may differ in the last bit."""
    np.testing.assert_allclose(np.frombuffer(pcm, "<i2"), np.frombuffer(other, "<i2"), rtol=0, atol=1)


def test_a_design_that_is_locked_is_spoken_by_the_model_that_clones(client: httpx.Client) -> None:
    """As its recording is, which is what a process that looks at the store for the first time finds there."""
    body = {**DESIGN, "text": "So it is.", "max_new_tokens": 13, "ignore_eos": True, "response_format": "wav"}
    made = client.post("/v1/audio/voices/design", json={**body, "seed": 1})
    assert made.status_code == 200, made.text
    candidates = made.json()["candidates"]
    assert len({each["audio"] for each in candidates}) == 3
    again = client.post("/v1/audio/voices/design", json={**body, "seed": 2})
    same_but_for_a_rounding(heard(again.json()["candidates"][0]), heard(candidates[1]))
    locked = client.post("/v1/audio/voices", json={"design": candidates[1]["id"], "name": "grandpa"})
    assert locked.status_code == 200, locked.text
    assert locked.json()["provenance"] == "design: VoiceDesign, seed 2"

    async def found() -> tuple[bytes, str | None]:
        VISITOR.set(EVERYBODY)
        voices = open_voices(VoiceSettings())
        voice = await voices.get("Grandpa")
        return await voices.recording(voice, voice.takes[0]), voice.takes[0].text

    recording, text = asyncio.run(found())
    assert text == "So it is."
    by_recording = speak(client, model="Base", ref_audio=base64.b64encode(recording).decode(), ref_text=text)
    for name in ("grandpa", locked.json()["id"]):
        same_but_for_a_rounding(speak(client, voice=name), by_recording)


def test_a_model_that_starts_again_closes_no_door_for_the_others(client: httpx.Client, several: ServerCommand) -> None:
    [base] = several.find("ServeReplica:talkray:Talker-Base")
    os.kill(base, signal.SIGKILL)
    until_s, seen = time.monotonic() + BOUND_S, list[httpx.Response]()
    while {each.status_code for each in seen} != {200, 503} or seen[-1].status_code == 503:
        assert time.monotonic() < until_s, [each.text for each in seen[-1:]]
        speak(client, **VOICE)
        assert client.get("/ready").status_code == 200
        seen.append(client.get("/ready", params={"model": "Base"}))
    refused = next(each for each in seen if each.status_code == 503)
    assert int(refused.headers["retry-after"]) >= 1
    assert "Base is loading" in refused.json()["error"]["message"]
    speak(client, **CLONE)
