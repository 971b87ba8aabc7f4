"""The WebSocket programs of the documents, in Python: a page, what it sends, and the file that has the speech."""

import subprocess
import sys
import wave
from pathlib import Path

import pytest

from tests.serve_app.cli.test_check_client import Server
from tests.serve_app.fake import pcm_of, utterance
from tests.test_docs_commands import ROOT, blocks


@pytest.mark.parametrize(("page", "text", "file"), [
    ("tutorial.md", "Good morning, how can I help you today?", "agent.wav"),
    ("websocket.md", "Hello from here.", "socket.wav"),
])  # fmt: skip
def test_a_program_saves_what_is_spoken(tmp_path: Path, page: str, text: str, file: str) -> None:
    [program] = [block.text for block in blocks(ROOT / "docs" / page) if block.language == "python"]
    with Server(list(utterance())) as server:
        code = program.replace("ws://127.0.0.1:8000", server.url)
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
    with wave.open(str(tmp_path / file)) as saved:
        assert (saved.getnchannels(), saved.getsampwidth(), saved.getframerate()) == (1, 2, 24000)
        assert saved.readframes(saved.getnframes()) == pcm_of(utterance())
    assert server.synthesizer.texts == [text]
