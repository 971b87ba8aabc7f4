"""The WebSocket programs of the documents, in Python: a page, what it sends, and the file that has the speech."""

import asyncio
import sys
import wave
from pathlib import Path

import pytest

from tests.serve_app.extensions.test_interruptions import serving
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, pcm_of, utterance
from tests.test_docs_commands import ROOT, blocks

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("page", "text", "file"), [
    ("tutorial.md", "Good morning, how can I help you today?", "agent.wav"),
    ("websocket.md", "Hello from here.", "socket.wav"),
])  # fmt: skip
async def test_a_program_saves_what_is_spoken(tmp_path: Path, page: str, text: str, file: str) -> None:
    [program] = [block.text for block in blocks(ROOT / "docs" / page) if block.language == "python"]
    synthesizer = FakeSynthesizer(CUSTOM_VOICE, utterance())
    async with serving(synthesizer) as url, asyncio.timeout(60):
        code = program.replace("ws://127.0.0.1:8000", url)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=tmp_path)
        assert await process.wait() == 0
    with wave.open(str(tmp_path / file)) as saved:
        assert (saved.getnchannels(), saved.getsampwidth(), saved.getframerate()) == (1, 2, 24000)
        assert saved.readframes(saved.getnframes()) == pcm_of(utterance())
    assert synthesizer.texts == [text]
