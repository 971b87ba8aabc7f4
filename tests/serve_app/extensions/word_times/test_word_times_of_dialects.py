"""Each way to a text carries word times as the table in docs/clients.md says, exact ones and estimates."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deployments.protocol import FinishReason, ModelInfo
from tests.serve_app import fake
from tests.serve_app.extensions.client import Json, talking
from tests.serve_app.extensions.timed import Reader
from tests.serve_app.one_model import client_for
from tools.suites.row import PostRow, SocketRow
from tools.suites.rows import POSTS, SOCKETS, here

pytestmark = pytest.mark.anyio

DOCUMENT = Path(__file__).parents[4] / "docs/clients.md"
HEADER = "x-word-times"
KNOWN = pytest.mark.parametrize("info", [fake.FOLLOWED, fake.CUSTOM_VOICE], ids=["exact", "estimated"])
ROWS: list[PostRow | SocketRow] = [*POSTS.values(), *SOCKETS.values()]


def table() -> Iterator[tuple[str, str, str]]:
    """Place, the field that carries the words, and what has the header."""
    section = DOCUMENT.read_text().partition("### Word times\n")[2].partition("\n### ")[0]
    lines = section.partition("|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    for places, carried_by, header in (re.split(r"\s*\|\s*", line.strip("| ")) for line in lines):
        for place in re.findall(r"`(.+?)`", places):
            yield place, re.findall(r"`(.+?)`", carried_by)[0], header


TABLE = {place: (carried_by, header) for place, carried_by, header in table()}


def test_the_table_has_each_way_that_carries_words() -> None:
    assert {place: carried_by for place, (carried_by, _) in TABLE.items()} == {
        **{row.place: row.times.in_field for row in ROWS if row.times.in_field},
        "GET /v1/audio/jobs/{job_id}/parts/{part}/words": "words",  # tests/serve_app/extensions/jobs/test_jobs.py
    }


def speaking(info: ModelInfo) -> fake.FakeSynthesizer:
    return fake.FakeSynthesizer(info, fake.followed() if info.word_times else fake.estimated())


def check(row: PostRow | SocketRow, info: ModelInfo, reader: Reader, header: str | None) -> None:
    known = "exact" if info.word_times else "estimated"
    assert header == (None if TABLE[row.place][1] == "none" else known)
    assert reader.marks == {None if info.word_times else True}
    begins = fake.FOLLOWED_MS if info.word_times else fake.ESTIMATED_MS
    assert [word for word, _, _ in reader.words] == fake.FOLLOWED_TEXT.split()
    assert [begin for _, begin, _ in reader.words] == pytest.approx(begins, abs=1)
    assert [end for _, _, end in reader.words] == pytest.approx([*begins[1:], 880], abs=1)


async def posted(row: PostRow, info: ModelInfo) -> tuple[httpx.Response, fake.FakeSynthesizer]:
    synthesizer = speaking(info)
    if row.path.endswith("/with-timestamps") and "/stream/" not in row.path:  # made again, with words of its own
        synthesizer.scripts = [[*synthesizer.script[:3], fake.chunk(b"", frames=0, finish_reason=FinishReason.EARLY)]]
    async with client_for(synthesizer) as client:
        answer = await client.post(row.path, json={**row.body(fake.FOLLOWED_TEXT), **row.times.asked_by})
    assert answer.status_code == 200, answer.text
    return answer, synthesizer


def messages(answer: httpx.Response) -> list[Json]:
    lines = [line for line in answer.text.splitlines() if line and not line.startswith("event:")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@KNOWN
@pytest.mark.parametrize("row", [row for row in POSTS.values() if row.times.in_field], ids=lambda row: row.place)
async def test_an_answer_carries_them(row: PostRow, info: ModelInfo) -> None:
    answer, synthesizer = await posted(row, info)
    assert synthesizer.requests[0].word_times
    reader = Reader(row.times.in_field)
    for message in messages(answer):
        reader.read(message)
    check(row, info, reader, answer.headers.get(HEADER))
    assert "word_timestamps" not in answer.headers.get("x-ignored", "")
    assert "add_timestamps" not in answer.headers.get("x-ignored", "")


@KNOWN
@pytest.mark.parametrize("row", [row for row in POSTS.values() if not row.times.in_field], ids=lambda row: row.place)
async def test_other_answers_say_nothing_of_them(row: PostRow, info: ModelInfo) -> None:
    answer, synthesizer = await posted(row, info)
    assert not synthesizer.requests[0].word_times
    assert HEADER not in answer.headers
    assert b'"estimated"' not in answer.content


@KNOWN
@pytest.mark.parametrize(
    "row", [row for row in SOCKETS.values() if row.times.in_field not in ("", "text_spoken")], ids=lambda row: row.place
)
async def test_a_socket_carries_them(row: SocketRow, info: ModelInfo) -> None:
    reader = Reader(row.times.in_field, row.times.counts_from)
    async with talking(speaking(info), row.path) as client:
        client.send(*row.speak_timed(fake.FOLLOWED_TEXT))
        told, _ = await client.until(**row.ends_with)
    for message in told:
        reader.read(message)
    check(row, info, reader, client.headers.get(HEADER))


@KNOWN
@pytest.mark.parametrize("row", [row for row in SOCKETS.values() if not row.times.in_field], ids=lambda row: row.place)
async def test_other_sockets_say_nothing_of_them(row: SocketRow, info: ModelInfo) -> None:
    synthesizer = speaking(info)
    async with talking(synthesizer, row.path, subprotocols=row.sample.protocols) as client:
        client.send(*row.speak(fake.FOLLOWED_TEXT))
        kind, value = next(iter(row.ends_with.items()))
        told, _ = await client.until(**{kind: value})
    assert not synthesizer.requests[0].word_times
    assert HEADER not in client.headers
    assert all("estimated" not in message for message in told)


@KNOWN
@pytest.mark.parametrize("name", here("flux"))
async def test_an_interruption_of_flux_says_what_was_spoken(name: str, info: ModelInfo) -> None:
    row = SOCKETS[name]
    interrupt = {"type": "Interrupt", "playback_offset": {"type": "time_ms", "value": 660}}
    async with talking(speaking(info), row.path) as client:
        client.send(*row.speak_timed(fake.FOLLOWED_TEXT))
        await client.until(**row.ends_with)
        client.send(interrupt)
        (*_, told), _ = await client.until(type="SpeechInterrupted")
    assert told["text_spoken"] == "Hello there all"
    assert client.headers[HEADER] == ("exact" if info.word_times else "estimated")
    assert told.get("estimated") is (None if info.word_times else True)
