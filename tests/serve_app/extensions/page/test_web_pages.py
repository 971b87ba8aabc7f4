"""The page's files: what they weigh, how they are sent, and what the page may ask."""

import gzip
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from serve_app.config import ApiSettings
from serve_app.distribution import version
from serve_app.extensions.page import web_pages
from tests.serve_app.fake import FakeSynthesizer, utterance
from tests.serve_app.one_model import client_for
from tools.suites.rows import DIALECTS

pytestmark = pytest.mark.anyio

FOLDER = Path(web_pages.__file__).parent / "pages"
FILES = [file for file in FOLDER.iterdir() if file.suffix in (".html", ".js", ".css")]
MOST_BYTES, MOST_LINES = 120_000, 2_140
BROWSER = {"accept": "text/html"}
TIMED = {"x-server-timing": "1"}


def client(settings: ApiSettings | None = None) -> httpx.AsyncClient:
    return client_for(FakeSynthesizer(script=utterance()), settings)


def test_the_page_stays_small() -> None:
    assert sum(file.stat().st_size for file in FILES) <= MOST_BYTES
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in FILES) <= MOST_LINES


async def test_its_files_come_packed_and_only_once() -> None:
    async with client() as http:
        for name in (file.name for file in FILES if file.suffix != ".html"):
            answer = await http.get(f"/page/{name}")
            assert (answer.headers["content-encoding"], answer.content) == ("gzip", (FOLDER / name).read_bytes())
            assert answer.headers["vary"] == "accept-encoding"
            plain = await http.get(f"/page/{name}", headers={"accept-encoding": "identity"})
            assert ("content-encoding" in plain.headers, plain.content) == (False, answer.content)
            again = await http.get(f"/page/{name}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for name in ("index.html", "swagger-ui.LICENSE", "..%2Fweb_pages.py"):
            assert (await http.get(f"/page/{name}")).status_code == 404
    assert gzip.decompress(web_pages._packed("app.js")[1]) == (FOLDER / "app.js").read_bytes()


@pytest.mark.parametrize(
    ("accept", "status"),
    [("*/*", 200), ("TEXT/HTML", 200), ("text/*;q=0.5, image/png", 200), ("", 200), ("application/json", 404)],
)
async def test_the_page_is_for_all_who_take_html(accept: str, status: int) -> None:
    async with client() as http:
        answer = await http.get("/", headers={"accept": accept})
    assert (answer.status_code, answer.headers.get("vary")) == (status, "accept" if status == 200 else None)


async def test_the_page_asks_this_server_and_the_chat_that_its_user_named() -> None:
    for query, connect in (
        ("", "'self'"),
        ("?chat=http://localhost:11434", "'self' http://localhost:11434"),
        ("?chat=https://chat.example.org", "'self' https://chat.example.org"),
        ("?chat=https://a.example.org;script-src *", "'self'"),
        ("?chat=https://a.example.org b", "'self'"),
        ("?chat=*", "'self'"),
    ):
        async with client() as http:
            policy = (await http.get(f"/{query}", headers=BROWSER)).headers["content-security-policy"]
        assert re.findall("connect-src ([^;]*)", policy) == [connect]
        assert "script-src 'self';" in policy


async def test_the_version_and_the_icon_are_filled_in() -> None:
    async with client() as http:
        page, docs = [(await http.get(path, headers=BROWSER)).text for path in ("/", "/docs")]
    [icon] = re.findall(r'rel="icon" href="(data:image/svg[^"]+)"', page)
    assert f'"{icon}"' in docs
    assert f'<footer class="soft">Talkray {version()} · ' in page
    assert "$" not in page


async def test_parts_of_missing_extensions_are_inert() -> None:
    for selected, missing in ((None, set()), (("page",), {"deepgram", "voices", "designs", "native"})):
        async with client(ApiSettings(extensions=selected)) as http:
            page = (await http.get("/", headers=BROWSER)).text
        assert {*re.findall(r'( inert)? data-needs="(.*?)"', page)} == {(" inert", name) for name in missing}


async def test_clients_are_those_of_check_client() -> None:
    async with client() as http:
        told = (await http.get("/page/clients.json")).json()
    samples = [dialect.sample for dialect in DIALECTS if dialect.sample is not None]
    assert [line for each in told for line in each["clients"]] == [line for each in samples for line in each.clients]
    for name in ("LiveKit", "Pipecat", "Open WebUI", "Home Assistant", "SillyTavern", "LibreChat"):
        assert any(line.startswith(f"{name}:") for each in told for line in each["clients"])


async def test_one_request_may_ask_how_its_first_audio_was_made() -> None:
    body = {"model": "tts-1", "input": "Hello.", "voice": "vivian", "response_format": "pcm"}
    marks = (("received", 1), ("request", 2))
    async with client_for(FakeSynthesizer(script=[replace(each, marks=marks) for each in utterance()])) as http:
        told = [await http.post("/v1/audio/speech", json=body, headers=asked) for asked in (TIMED, {})]
    assert ["server-timing" in each.headers for each in told] == [True, False]
