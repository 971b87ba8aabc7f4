"""docs/clients.md says which dialects speak in the default voice when a voice is not here, and which answer 400."""

import re
from pathlib import Path

import httpx
import pytest

from serve_app.config import ApiSettings
from serve_app.extensions.voices.settings import VoiceSettings
from tests.serve_app.extensions.voices.speakers import store
from tests.serve_app.fake import BASE, FakeSynthesizer, utterance
from tests.serve_app.one_model import client_of, one_api
from tools.suites.rows import is_here

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


@pytest.mark.parametrize("dialect", [dialect for dialect, (path, _) in ASKED.items() if is_here(path)])
async def test_the_page_says_what_an_unknown_voice_gets(client: httpx.AsyncClient, dialect: str) -> None:
    path, body = ASKED[dialect]
    answer = await client.post(path, json=body)
    is_refused = answer.status_code == 400 or '"status": "error"' in answer.text
    speaking, refusing = named()
    assert (dialect in refusing, dialect in speaking) == (is_refused, not is_refused)


@pytest.mark.parametrize("dialect", ["Deepgram", "ElevenLabs", "Cartesia"])
async def test_the_default_voice_may_have_a_name_in_any_script(tmp_path: Path, dialect: str) -> None:
    path, body = ASKED[dialect]
    settings = ApiSettings(voices=VoiceSettings(store=str(tmp_path)), default_voice="声音")
    api = one_api(FakeSynthesizer(BASE, utterance()), settings)
    async with client_of(api) as client:
        await store(client, "声音")
        answer = await client.post(path, json=body)
    assert answer.status_code == 200
    assert "no such voice here, ?? speaks" in answer.headers["x-ignored"]


async def test_a_lexicon_that_is_not_here_may_have_a_name_in_any_script(client: httpx.AsyncClient) -> None:
    locator = {"pronunciation_dictionary_id": "词典"}
    body = {"text": "Hello", "pronunciation_dictionary_locators": [locator]}
    answer = await client.post("/v1/text-to-speech/ryan", json=body)
    assert answer.status_code == 200
    assert "Lexicon '??' is unknown" in answer.headers["x-ignored"]
