"""What a newcomer asks of a fresh `talkray serve`: commands and sockets only."""

import asyncio
import io
import json
import re
import subprocess
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import aiohttp
import av
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


def test_clients_of_the_api_get_json_as_before(client: httpx.Client) -> None:
    answer = client.get("/", headers={"accept": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert client.get("/", headers={"accept": "*/*"}).headers["content-type"].startswith("text/html")


def test_the_documentation_loads_from_this_server_alone(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text) + re.findall(r"url: '([^']+)'", page.text)
    fetched = [client.get(urljoin("/docs", link)) for link in loaded if not link.startswith("data:")]
    types = {answer.headers["content-type"].partition(";")[0] for answer in fetched if answer.status_code == 200}
    assert (len(fetched), types) == (3, {"text/javascript", "text/css", "application/json"})
    assert all("://" not in link for link in loaded if not link.startswith("data:"))


def test_the_first_file_of_readme_says_how_long_it_is(url: str, tmp_path: Path) -> None:
    command = re.findall(r"^curl (?:.*\\\n)*.*$", (ROOT / "README.md").read_text(), re.MULTILINE)[0]
    subprocess.run(["bash", "-c", command.replace("http://127.0.0.1:8000", url)], cwd=tmp_path, check=True)
    [file] = tmp_path.iterdir()
    if file.suffix == ".wav":
        with wave.open(str(file)) as read:
            assert 0 < read.getnframes() / read.getframerate() < 30
    with av.open(str(file)) as container:
        [stream] = container.streams.audio
        decoded = sum(frame.samples / frame.sample_rate for frame in container.decode(stream))
        assert container.duration is not None
        assert 0 < container.duration / av.time_base < 30
        assert container.duration / av.time_base == pytest.approx(decoded, abs=0.2)


def test_a_wav_that_is_not_streamed_is_finite_and_a_streamed_one_is_read_to_its_end(client: httpx.Client) -> None:
    whole = client.post(SPEECH, json=HELLO | {"response_format": "wav", "stream": False}).content
    with wave.open(io.BytesIO(whole)) as read:
        assert read.getnframes() * 2 + 44 == len(whole)
    streamed = client.post(SPEECH, json=HELLO | {"response_format": "wav"}).content
    with av.open(io.BytesIO(streamed)) as container:
        assert sum(frame.samples for frame in container.decode(audio=0)) * 2 + 44 == len(streamed)
    assert '"stream": false' in (ROOT / "docs" / "api.md").read_text()


IGNORED = {"ref_text": "Softly.", "response_fromat": "wav", "a\r\nset-cookie: b": 1}


def test_what_is_ignored_is_named_with_its_reason(client: httpx.Client) -> None:
    answer = client.post(SPEECH, json=HELLO | IGNORED)
    assert answer.status_code == 200
    assert answer.headers["x-ignored"].split("; ") == [
        "ref_text (the loaded model does not clone voices)",
        "response_fromat (unknown field, did you mean response_format?)",
        "a??set-cookie:?b (unknown field)",
    ]
    assert "set-cookie" not in answer.headers
    assert "x-ignored" not in client.post(SPEECH, json=HELLO).headers


def test_an_event_stream_names_it_too(client: httpx.Client) -> None:
    answer = client.post(SPEECH, json=HELLO | IGNORED | {"stream_format": "sse"})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert [entry["field"] for entry in events[-1]["ignored"]][:2] == ["ref_text", "response_fromat"]


def test_a_sample_rate_is_not_ignored(client: httpx.Client) -> None:
    answer = client.post(SPEECH, json=HELLO | {"sample_rate": 16000, "response_format": "pcm"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/pcm;rate=16000;channels=1")
    assert "x-ignored" not in answer.headers


def test_a_websocket_names_it_too(url: str) -> None:
    async def started() -> dict[str, Any]:
        async with aiohttp.ClientSession(url) as session, session.ws_connect(f"{SPEECH}/ws") as socket:
            await socket.send_json(HELLO | IGNORED | {"type": "speak", "stream": False})
            answer: dict[str, Any] = await socket.receive_json(timeout=BOUND_S)
            return answer

    reasons = {entry["field"]: entry["reason"] for entry in asyncio.run(started())["ignored"]}
    assert set(reasons) == {"response_fromat", "a??set-cookie:?b", "ref_text", "stream"}


def test_dropped_markup_is_named_and_its_pause_is_heard(client: httpx.Client) -> None:
    text = '<speak>**Hello.**<break time="2s"/><u>Goodbye.</u></speak>'
    answer = client.post(SPEECH, json=HELLO | {"input": text, "response_format": "pcm"})
    assert answer.headers["x-ignored"] == "input (not read aloud: marks of Markdown 2, tag u 2)"
    before, _, after = answer.content.partition(bytes(2 * 2 * int(answer.headers["x-sample-rate"])))
    assert min(len(before), len(after)) > int(answer.headers["x-sample-rate"]) / 2


@pytest.mark.parametrize(("fields", "param"), [
    ({"language": "de"}, "language"), ({"language": "klingon"}, "language"),
    ({"input": "今天天气很好。"}, "input"), ({"input": "Привет, как дела?"}, "input"),
    ({"input": "Das ist ein schöner Tag, und ich gehe mit dem Hund in den Park."}, "input"),
])  # fmt: skip
def test_what_the_voice_cannot_speak_is_named(client: httpx.Client, fields: dict[str, str], param: str) -> None:
    answer = client.post(SPEECH, json=HELLO | {"voice": "nora"} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "'nora'" in message(answer)
    assert "speaks english" in message(answer)


def test_who_asks_to_try_is_let(client: httpx.Client) -> None:
    text = "Das ist ein schöner Tag, und ich gehe mit dem Hund in den Park."
    answer = client.post(SPEECH, json=HELLO | {"input": text, "language": "de", "any_language": True})
    assert (answer.status_code, answer.headers["x-ignored"].partition(" ")[0]) == (200, "language")


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
        assert re.search(r"raise api\.admission|more or faster replicas", text)
        counts = re.search(r"active streams: (\d+), waiting for first audio: (\d+)", text)
        assert counts is None or 0 < int(counts[1]) + int(counts[2]) < crowd
