"""A book, a data set and a dialogue by the embedded voice."""

import asyncio
import json
from pathlib import Path

import aiohttp
import av
import pytest

from talkray_tools import dataset
from talkray_tools.arguments import run_command
from talkray_tools.book import __main__ as command
from tests.e2e.speech import PATH
from tests.tools.book import epubs
from tools.experiments.faults.polite import difference

pytestmark = pytest.mark.anyio


async def test_a_book(server: str, http: aiohttp.ClientSession, tmp_path: Path) -> None:
    pages = {
        "a.xhtml": epubs.page("<h1>Chapter One</h1><p>[Ann]: The rain has stopped.</p>"),
        "b.xhtml": epubs.page("<h1>Chapter Two</h1><p>We went home.</p>"),
    }
    file = epubs.write_epub(tmp_path / "rain.epub", pages)
    arguments = [str(file), "--url", server, "--voice", "nora", "--voice-of", "Ann=felix", "--captions", "srt"]
    assert await asyncio.to_thread(run_command, command.book, "talkray book", arguments) == 0
    report = json.loads((tmp_path / "rain.report.json").read_text())
    with av.open(str(tmp_path / "rain.m4b")) as opened:
        chapters = [(each["metadata"]["title"], each["start"] / 1000) for each in opened.chapters()]
        length_s = opened.duration / 1e6
    told = [(each["title"], pytest.approx(each["start_s"], abs=0.01)) for each in report["chapters"]]
    assert chapters == told
    assert length_s == pytest.approx(report["length_s"], abs=0.2)
    captions = (tmp_path / "rain.srt").read_text().split("\n\n")
    assert [caption.strip().split("\n")[2] for caption in captions] == [
        "Chapter One", "The rain has stopped.", "Chapter Two", "We went home.",
    ]  # fmt: skip
    async with http.get("/v1/audio/jobs") as answer:
        assert (await answer.json())["data"] == []


async def test_a_dataset_has_codes_of_plain_requests(server: str, http: aiohttp.ClientSession, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "One."}\n{"id": "two", "text": "Two words.", "voice": "felix"}\n')
    arguments = [str(file), "-o", str(tmp_path / "set"), "--url", server, "--voice", "nora", "--format", "wav"]
    assert await asyncio.to_thread(run_command, dataset.dataset, "talkray dataset", arguments) == 0
    entries = [json.loads(line) for line in (tmp_path / "set" / "manifest.jsonl").read_text().splitlines()]
    assert [each["id"] for each in entries] == ["000001", "two"]
    for each in entries:
        body = {"input": each["text"], "voice": each["voice"], "seed": each["seed"], "response_format": "pcm"}
        async with http.post(PATH, json=body) as answer:
            assert difference((tmp_path / "set" / each["audio"]).read_bytes()[44:], await answer.read()) is None
