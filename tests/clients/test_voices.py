"""SDKs, unmodified, keep a voice and speak with it. Models are played: no sound is judged."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.config import AdmissionSettings
from tests.clients.environments import command
from tests.serve_app.cli.test_check_client import Server
from tests.serve_app.fake import BASE, VOICE_DESIGN, FakeSynthesizer, utterance

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(
    ("environment", "script"), [("openai", "sdk_openai_voices.py"), ("elevenlabs", "sdk_elevenlabs_designs.py")]
)
def test_an_sdk_keeps_a_voice(environment: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALKRAY_DATA", str(tmp_path))
    models = {
        name: FakeSynthesizer(replace(info, name=name, checkpoint=name), script=utterance(10))
        for name, info in (("designs", VOICE_DESIGN), ("clones", BASE))
    }
    with Server({name: (each, AdmissionSettings()) for name, each in models.items()}) as server:
        subprocess.run([*command(environment, SCRIPTS / script), server.url], check=True, timeout=300)
    assert models["clones"].requests[0].text == "Good evening."
    if environment == "openai":
        assert {request.instructions for request in models["designs"].requests} == {"A calm old man."}
        reference = models["clones"].requests[-1].reference
        assert reference is not None
        assert reference.text == "So it is."
