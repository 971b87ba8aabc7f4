"""docs/clients.md says which dialects speak in the default voice when a voice is not here, and which answer 400."""

import re
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.anyio

NOBODY = "nobody"
ASKED = {
    "OpenAI": ("/v1/audio/speech", {"input": "Hello", "voice": NOBODY}),
    "vLLM-Omni": ("/v1/audio/speech/batch", {"items": [{"input": "Hello"}], "voice": NOBODY}),
    "Kokoro-FastAPI": ("/dev/captioned_speech", {"input": "Hello", "voice": NOBODY}),
    "Mistral": ("/v1/audio/speech", {"input": "Hello", "voice_id": NOBODY}),
    "Deepgram": (f"/v1/speak?model={NOBODY}", {"text": "Hello"}),
    "ElevenLabs": (f"/v1/text-to-speech/{NOBODY}", {"text": "Hello"}),
    "Cartesia": ("/tts/bytes", {"transcript": "Hello", "voice": {"id": NOBODY}, "output_format": {"container": "wav"}}),
    "DashScope": (
        "/api/v1/services/aigc/multimodal-generation/generation",
        {"model": "qwen3-tts-flash", "input": {"text": "Hello", "voice": NOBODY}},
    ),
    "VoxServe": ("/generate", {"text": "Hello", "speaker": NOBODY}),
}


def named() -> tuple[str, str]:
    """What the page says of dialects that speak, and of those that refuse."""
    page = (Path(__file__).parents[3] / "docs" / "clients.md").read_text()
    found = re.search(r"^- \*\*A voice that is not here\*\* (.*?)It is a 400 (.*?)^- ", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1], found[2]


@pytest.mark.parametrize("dialect", ASKED)
async def test_the_page_says_what_an_unknown_voice_gets(client: httpx.AsyncClient, dialect: str) -> None:
    path, body = ASKED[dialect]
    answer = await client.post(path, json=body)
    is_refused = answer.status_code == 400 or '"status": "error"' in answer.text
    speaking, refusing = named()
    assert (dialect in refusing, dialect in speaking) == (is_refused, not is_refused)
