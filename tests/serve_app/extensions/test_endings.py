"""Planted endings, over all sockets: what was not sent yet is made again, else the last message says how it ended."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import reduce
from operator import getitem

import pytest

from deployments.protocol import FinishReason
from tests.serve_app.api.test_application import twice
from tests.serve_app.extensions.client import Client, Json, talking
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, chunk, pcm_of, utterance
from tests.serve_app.one_model import posted
from tools.suites.row import PostRow, SocketRow
from tools.suites.rows import POSTS, SOCKETS

pytestmark = pytest.mark.anyio

TEXT = "Hello there.\n\nThis is the second part of it.\n\nThis is the third one."
SECONDS = bytes([1, 0]) * 2 * CUSTOM_VOICE.sample_rate  # two

socket_rows = pytest.mark.parametrize("row", SOCKETS.values(), ids=SOCKETS)


def ending(*reasons: FinishReason) -> FakeSynthesizer:
    """Two seconds for each request, whose ends have these reasons; STOP where there is none left."""
    first, *rest = ([chunk(SECONDS), chunk(b"", frames=0, finish_reason=end)] for end in (FinishReason.STOP, *reasons))
    return FakeSynthesizer(script=first, scripts=rest)


@asynccontextmanager
async def speaking(row: SocketRow, synthesizer: FakeSynthesizer) -> AsyncIterator[Client]:
    async with talking(synthesizer, row.path, subprotocols=row.sample.protocols) as client:
        client.send(*row.speak(TEXT))
        yield client


async def last_message(client: Client, row: SocketRow) -> Json:
    kind, value = next(iter(row.ends_with.items()))
    (*_, last), _ = await client.until(**{kind: value})
    inner: Json = last.get("response", last)
    return inner


def reason_in(last: Json) -> object:
    return last["finish_reason"] if "finish_reason" in last else last["stop_reason"]


@socket_rows
async def test_the_last_message_says_how_speech_that_was_sent_ended(row: SocketRow) -> None:
    async with speaking(row, ending(FinishReason.RUNAWAY)) as client:
        assert reason_in(await last_message(client, row)) == FinishReason.RUNAWAY


@socket_rows
async def test_a_later_segment_that_ends_badly_is_made_again(row: SocketRow) -> None:
    synthesizer = ending(FinishReason.STOP, FinishReason.LOOP)
    async with speaking(row, synthesizer) as client:
        assert reason_in(await last_message(client, row)) == FinishReason.STOP
    numbers = [request.request_id.rpartition(".")[2] for request in synthesizer.requests]
    assert numbers[1:] == ["2", "2", "3"]
    _, bad, again, _ = synthesizer.requests
    assert bad.seed != again.seed


def streaming(of: str) -> list[PostRow]:
    return [row for row in POSTS.values() if row.end is not None and row.end.of == of]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.RUNAWAY])
@pytest.mark.parametrize("row", streaming("lines"), ids=lambda row: row.path)
async def test_the_last_line_of_json_says_it_too(row: PostRow, reason: FinishReason) -> None:
    answer = await posted(ending(reason), row.path, json=row.body(TEXT))
    *lines, last = map(json.loads, answer.text.splitlines())
    assert lines
    assert not any("finish_reason" in line for line in lines)
    assert last["finish_reason"] == reason
    assert {*last} == {*lines[0], "finish_reason"}  # its audio is empty


@pytest.mark.parametrize("row", streaming("events"), ids=lambda row: row.place)
async def test_the_last_event_of_a_stream_says_it_too(row: PostRow) -> None:
    assert row.end is not None
    body = row.body(TEXT, **row.end.asked_by)
    answer = await posted(ending(FinishReason.RUNAWAY), row.path, json=body, headers=row.end.headers)
    *_, data = [line.removeprefix("data:") for line in answer.text.splitlines() if line.startswith("data:")]
    last = json.loads(data)
    assert last.get("output", last)["finish_reason"] == FinishReason.RUNAWAY


WHOLE = {name: row for name, row in POSTS.items() if row.whole is not None}


@pytest.mark.parametrize("name", WHOLE)
async def test_whole_audio_in_json_that_ends_badly_is_made_again(name: str) -> None:
    row, synthesizer = WHOLE[name], twice(*utterance(2))
    assert row.whole is not None
    query, fields, place = row.whole
    answer = await posted(synthesizer, row.with_query(query), json=row.body(**fields))
    assert answer.headers["x-finish-reason"] == "stop"
    assert base64.b64decode(reduce(getitem, place, answer.json())) == pcm_of(utterance(2))
    first, second = synthesizer.requests
    assert first.seed != second.seed
