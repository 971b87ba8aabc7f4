"""SDKs, unmodified, create an access token and speak with it. The model is played."""

import subprocess
from pathlib import Path

import pytest

from serve_app.cli.key_file import create_key
from tests.clients.environments import command
from tests.serve_app.cli.test_check_client import Server
from tests.serve_app.fake import utterance

SCRIPT = Path(__file__).parent / "scripts/sdk_tokens.py"


@pytest.mark.parametrize("sdk", ["openai", "elevenlabs", "deepgram", "cartesia"])
def test_an_sdk_creates_and_uses_a_token(sdk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALKRAY_DATA", str(tmp_path))
    keys = tmp_path / "keys.json"
    key = create_key(keys, "ada")
    with Server(list(utterance()), keys) as server:
        subprocess.run([*command(sdk, SCRIPT), sdk, server.url, key], check=True, timeout=300)
