"""What a newcomer asks of a fresh `talkray serve`: commands and sockets only."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from tests.e2e.black_box import ServerCommand

ROOT = Path(__file__).parents[3]
BOUND_S = 120
SPEECH = "/v1/audio/speech"
HELLO = {"model": "tts-1", "input": "Hello.", "voice": "alloy", "response_format": "pcm"}


@pytest.fixture(scope="module")
def url(plain: ServerCommand) -> str:
    return plain.url


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=BOUND_S) as client:
        yield client


def message(answer: httpx.Response) -> str:
    text: str = answer.json()["error"]["message"]
    return text


def test_a_browser_gets_a_page_that_loads_nothing_from_elsewhere(client: httpx.Client) -> None:
    answer = client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "<textarea" in answer.text
    parts = re.findall(r'(?:src|href)="(page/[^"]+)"', answer.text)
    parts += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', client.get("/page/app.js").text)]
    loaded = [answer, *(client.get(f"/{part}") for part in parts)]
    assert all(each.status_code == 200 for each in loaded)
    assert len(loaded) > 10
    for each in loaded:  # no address of another server
        assert not re.search(r"""(?:src=|href=|url\(|import\(|fetch\(|from )\s*["'`]?(?:https?:)?//""", each.text)
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_the_documentation_loads_from_this_server_alone(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text) + re.findall(r"url: '([^']+)'", page.text)
    fetched = [client.get(urljoin("/docs", link)) for link in loaded if not link.startswith("data:")]
    types = {answer.headers["content-type"].partition(";")[0] for answer in fetched if answer.status_code == 200}
    assert (len(fetched), types) == (3, {"text/javascript", "text/css", "application/json"})
    assert all("://" not in link for link in loaded if not link.startswith("data:"))


def test_what_is_ignored_is_named_with_its_reason(client: httpx.Client) -> None:
    ignored = {"ref_text": "Softly.", "response_fromat": "wav", "a\r\nset-cookie: b": 1}
    answer = client.post(SPEECH, json=HELLO | ignored)
    assert answer.status_code == 200
    assert answer.headers["x-ignored"].split("; ") == [
        "ref_text (the loaded model does not clone voices)",
        "response_fromat (unknown field, did you mean response_format?)",
        "a??set-cookie:?b (not supported)",
    ]
    assert "set-cookie" not in answer.headers
    assert "x-ignored" not in client.post(SPEECH, json=HELLO).headers


def test_a_path_that_is_none_says_where_to_look(client: httpx.Client) -> None:
    assert "/docs" in message(client.get("/v1/elsewhere"))
    assert "POST" in message(client.get(SPEECH))


def test_a_refusal_says_how_long_to_wait_and_what_raises_the_limit(url: str) -> None:
    crowd = 200  # the talker alone takes 24: eight rows, and 16 that wait

    async def ask() -> list[tuple[int, str | None, str]]:
        async def one(client: httpx.AsyncClient) -> tuple[int, str | None, str]:
            answer = await client.post(SPEECH, json=HELLO)
            refused = answer.status_code == 429
            return answer.status_code, answer.headers.get("retry-after"), message(answer) if refused else ""

        async with httpx.AsyncClient(base_url=url, timeout=BOUND_S) as client:
            return await asyncio.gather(*(one(client) for _ in range(crowd)))

    refused = [(after, text) for status, after, text in asyncio.run(ask()) if status == 429]
    assert refused
    for after, text in refused:
        assert text.endswith(f"Try again in {after} s.")
        assert re.search(r"raise api\.admission|more or faster replicas|More replicas", text)
        counts = re.search(r"active streams: (\d+), waiting for first audio: (\d+)", text)
        assert counts is None or 0 < int(counts[1]) + int(counts[2]) < crowd
