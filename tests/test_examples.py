"""docs/examples where something is missing: one line names it. `make clients` runs them with all that they need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.cli.ray_settings import free_port
from serve_app.config import ApiSettings
from tests.serve_app.extensions.client import talking
from tests.serve_app.fake import FakeSynthesizer, pcm_of, utterance
from tests.serve_app.one_model import client_for

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.mark.parametrize(("name", "arguments", "said"), [
    ("audiobook.sh", (), "{url} does not respond like a Talkray server"),
    ("stored_voice.sh", ("ada.wav", "Hello."), "{url} does not respond. Start `talkray serve`, or set TALKRAY_URL"),
    ("speaking_chat.py", (), "does not respond (Cannot connect"),
    ("livekit_agent.py", (), "livekit is missing: pip install livekit-agents"),
    ("pipecat_agent.py", (), "pipecat is missing: pip install "),
])  # fmt: skip
def test_what_is_missing_is_named_in_a_line(tmp_path: Path, name: str, arguments: tuple[str, ...], said: str) -> None:
    """Without a server and without the packages of others, from another folder, and with no `talkray` on the path."""
    url, run = f"http://127.0.0.1:{free_port()}", "sh" if name.endswith(".sh") else sys.executable
    environment = {**os.environ, "TALKRAY_URL": url, "PATH": os.defpath}
    done = subprocess.run(
        [run, str(EXAMPLES / name), *arguments], cwd=tmp_path, env=environment, input="Hi\n",
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert said.format(url=url) in done.stderr


@pytest.mark.anyio
async def test_the_dialect_of_a_house_speaks_over_http_and_over_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    settings = ApiSettings(extensions=("default", "house_dialect:EXTENSION"))
    synthesizer = FakeSynthesizer(script=utterance())
    async with client_for(synthesizer, settings) as client:
        answer = await client.post("/house/say", json={"words": "Hello.", "who": "ryan"})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/mpeg")
        assert (await client.post("/house/say", json={"words": 7})).json()["error"]["param"] == "words"
        assert "/house/say" in (await client.get("/openapi.json")).json()["paths"]
    async with talking(synthesizer, "/house/live?who=ryan", settings=settings) as client:
        words = [{"type": "words", "words": text} for text in ("Hel", "lo **there**.")]
        client.send(*words, {"type": "over"})
        (ready, last), audio = await client.until(type="spoken")
        assert (ready, audio, last["finish_reason"]) == ({"type": "ready"}, pcm_of(utterance()), "stop")
        assert last["left_out"] == [{"what": "marks of Markdown", "count": 2}]
        client.send({"type": "words", "words": 7})
        assert (await client.next())["error"]["param"] == "words"
    assert synthesizer.texts[0] == "Hello."
