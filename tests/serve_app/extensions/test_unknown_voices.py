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
from tools.suites.documented import Json
from tools.suites.row import PostRow
from tools.suites.rows import POSTS

pytestmark = pytest.mark.anyio

NOBODY = "nobody"
ASKED = {row.name: row for row in POSTS.values() if row.name}


def asked(row: PostRow) -> tuple[str, Json]:
    return row.sample.filled(voice=NOBODY).path, row.body(voice=NOBODY)


def named() -> tuple[str, str]:
    """What the page says of dialects that speak, and of those that refuse."""
    page = (Path(__file__).parents[3] / "docs" / "clients.md").read_text()
    found = re.search(r"^- \*\*A voice that is not here\*\* (.*?)It is a 400 (.*?)^- ", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1], found[2]


@pytest.mark.parametrize("dialect", ASKED)
async def test_the_page_says_what_an_unknown_voice_gets(client: httpx.AsyncClient, dialect: str) -> None:
    path, body = asked(ASKED[dialect])
    answer = await client.post(path, json=body)
    is_refused = answer.status_code == 400 or '"status": "error"' in answer.text
    speaking, refusing = named()
    assert (dialect in refusing, dialect in speaking) == (is_refused, not is_refused)


@pytest.mark.parametrize("dialect", [name for name in ("Deepgram", "ElevenLabs", "Cartesia") if name in ASKED])
async def test_the_default_voice_may_have_a_name_in_any_script(tmp_path: Path, dialect: str) -> None:
    path, body = asked(ASKED[dialect])
    settings = ApiSettings(voices=VoiceSettings(store=str(tmp_path)), default_voice="声音")
    api = one_api(FakeSynthesizer(BASE, utterance()), settings)
    async with client_of(api) as client:
        await store(client, "声音")
        answer = await client.post(path, json=body)
    assert answer.status_code == 200
    assert "unknown voice, used ??" in answer.headers["x-ignored"]
