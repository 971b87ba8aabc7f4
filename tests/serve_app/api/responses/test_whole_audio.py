"""Answers that are sent when all of their audio is there: how much of it there may be, and whose."""

import asyncio
import json
from base64 import b64decode
from collections.abc import Iterator

import pytest
from fastapi import FastAPI

from serve_app.api.access.callers import FairShare
from serve_app.api.responses import whole_audio
from serve_app.api.responses.whole_audio import PART_BYTES, ByteQuota, object_with
from serve_app.config import AdmissionSettings, ApiSettings
from tests.serve_app import asgi
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, Step, chunk, pcm_of, tone, utterance
from tests.serve_app.one_model import one_api
from tools.suites.rows import POSTS

pytestmark = pytest.mark.anyio

FRAME = tone(CUSTOM_VOICE.frame_samples)
MOST_FRAMES = 10
MAX_BYTES = MOST_FRAMES * len(FRAME) + 44  # of an answer; a WAV header is one as well
SPEECH, BATCH = "/v1/audio/speech", "/v1/audio/speech/batch"
WHOLE = {"input": "Hello", "voice": "ryan", "response_format": "wav", "stream": False}
ROUTES = [
    (SPEECH, WHOLE),
    (SPEECH, WHOLE | {"response_format": "pcm_f32le"}),
    (SPEECH, WHOLE | {"response_format": "mp3"}),
    (SPEECH, WHOLE | {"stream_format": "sse"}),
    *((row.with_query(row.whole[0]), row.body(**row.whole[1])) for row in POSTS.values() if row.whole),
]


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[FairShare]:
    """For three of the largest answers, one and a half of them for one caller."""
    room = FairShare(3 * MAX_BYTES)
    monkeypatch.setattr(whole_audio, "MAX_WHOLE_BYTES", MAX_BYTES)
    monkeypatch.setattr(ByteQuota, "_room", room)
    yield room
    assert not room._held, "answers that are over keep memory"


class Long:
    """A script of far more frames than an answer may have."""

    def __init__(self) -> None:
        self.num_read = 0

    def __iter__(self) -> Iterator[Step]:
        for self.num_read in range(1, 100 * MOST_FRAMES):
            yield chunk(FRAME)


def api_of(script: object) -> FastAPI:
    return one_api(FakeSynthesizer(script=script), ApiSettings(admission=AdmissionSettings()))  # type: ignore[arg-type]


def ask(api: FastAPI, path: str, body: object, *, address: str = "10.0.0.1") -> asgi.Connection:
    return asgi.http(api, "POST", path, body=body, headers={"x-forwarded-for": address})


async def answer(connection: asgi.Connection) -> tuple[int, bytes]:
    whole = await connection.answer()
    return whole.status, whole.content


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_audio_is_whole_within_the_limit_and_a_413_beyond_it(path: str, body: dict[str, object]) -> None:
    async with ask(api_of(utterance()), path, body) as connection:
        assert (await answer(connection))[0] == 200
    script = Long()
    async with ask(api_of(script), path, body) as connection:
        status, content = await answer(connection)
    assert status == 413, content
    assert "set stream to true" in json.loads(content)["error"]["message"]
    assert script.num_read <= MOST_FRAMES + 1


async def test_a_known_length_is_refused_before_anything_is_spoken() -> None:
    synthesizer = FakeSynthesizer(script=utterance())
    body = WHOLE | {"ignore_eos": True, "max_new_tokens": 4, "speed": 0.25, "sample_rate": 48000}
    async with ask(one_api(synthesizer, ApiSettings()), SPEECH, body) as connection:
        status, content = await answer(connection)
    assert (status, json.loads(content)["error"]["param"]) == (413, "max_new_tokens")
    assert synthesizer.requests == []


async def test_one_client_leaves_room_to_the_others() -> None:
    """Two answers of ten frames are on their way to readers that read nothing."""
    api = api_of(utterance(MOST_FRAMES))
    async with ask(api, SPEECH, WHOLE) as first:
        first.stall()
        await first.sending.wait()
        async with ask(api, SPEECH, WHOLE) as second:
            status, content = await answer(second)
        assert status == 429, content
        assert "set stream to true" in json.loads(content)["error"]["message"]
        async with ask(api, SPEECH, WHOLE, address="10.0.0.2") as other:
            assert (await answer(other))[0] == 200
        first.flow()
        assert (await answer(first))[0] == 200


async def test_a_client_that_leaves_gives_its_room_back(room: FairShare) -> None:
    synthesizer = FakeSynthesizer(script=[chunk(FRAME), asyncio.Event()])
    async with ask(one_api(synthesizer, ApiSettings()), SPEECH, WHOLE) as connection:
        await synthesizer.waiting.wait()
        assert room._held.total() == len(FRAME)
        connection.receive({"type": "http.disconnect"})
        await asyncio.wait((connection.task,))


async def test_each_result_of_a_batch_is_sent_when_it_is_there(room: FairShare) -> None:
    has_begun, go_on = asyncio.Event(), asyncio.Event()
    script: list[Step] = utterance(MOST_FRAMES)

    class Second(FakeSynthesizer):
        async def describe(self):  # type: ignore[no-untyped-def]
            if len(self.requests) == 1:
                has_begun.set()
                await go_on.wait()
            return await super().describe()

    api = one_api(Second(script=script), ApiSettings())
    items = [{"input": "One."}, {"input": "Two."}, {"input": "Three.", "ignore_eos": True, "max_new_tokens": 999}]
    async with ask(api, BATCH, {"voice": "ryan", "items": items}) as connection:
        await has_begun.wait()
        assert connection.has_sent
        assert not room._held
        go_on.set()
        status, content = await answer(connection)
    told = json.loads(content)
    assert (status, told["total"], told["succeeded"], told["failed"]) == (200, 3, 2, 1)
    assert [b64decode(result["audio_data"])[44:] for result in told["results"][:2]] == 2 * [pcm_of(script)]  # type: ignore[arg-type]
    assert "set stream to true" in told["results"][2]["error"]


def test_audio_in_parts_is_the_same_object() -> None:
    audio = bytes(range(256)) * 1000
    for size in (0, 1, 2, len(audio)):
        fields = {"a": ["é"], "audio": whole_audio.AUDIO_HERE, "b": whole_audio.AUDIO_HERE}
        told = json.loads(b"".join(object_with(fields, audio[:size])))
        assert b64decode(told["audio"]) == audio[:size]
        assert told["b"] == whole_audio.AUDIO_HERE


@pytest.mark.parametrize("path", [SPEECH, BATCH])
async def test_a_large_answer_leaves_turns_to_other_streams(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast its client reads."""
    monkeypatch.setattr(whole_audio, "MAX_WHOLE_BYTES", 16 << 20)
    monkeypatch.setattr(ByteQuota, "_room", FairShare(32 << 20))
    counts: set[int] = set()  # of the messages that were sent, as others see it at their turns
    body = {"voice": "ryan", "items": [WHOLE]} if path == BATCH else WHOLE
    async with ask(api_of([chunk(FRAME)] * 500), path, body) as connection:
        while not connection.task.done():
            await asyncio.sleep(0)
            counts.add(connection.num_sent)
        assert (await answer(connection))[0] == 200
    assert len(counts) >= 500 * len(FRAME) // PART_BYTES > 15
