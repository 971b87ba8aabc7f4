import base64
import json
from dataclasses import replace
from itertools import pairwise

import httpx
import pytest

from tests.serve_app.client_audio.test_formats import decode
from tests.serve_app.fake import CUSTOM_VOICE, FOLLOWED_MS, FOLLOWED_TEXT, FakeSynthesizer, followed, pcm_of
from tests.serve_app.one_model import client_for

pytestmark = pytest.mark.anyio

PATH = "/dev/captioned_speech"


async def lines(body: dict[str, object]) -> tuple[httpx.Response, list[dict[str, object]]]:
    synthesizer = FakeSynthesizer(replace(CUSTOM_VOICE, word_times=True), followed())
    async with client_for(synthesizer) as client:
        answer = await client.post(PATH, json={"input": FOLLOWED_TEXT, "voice": "alloy", **body})
    assert answer.status_code == 200, answer.text
    assert synthesizer.requests[0].word_times
    return answer, [json.loads(line) for line in answer.text.splitlines()]


def words(told: list[dict[str, object]]) -> list[str]:
    return [word["word"] for line in told for word in line["timestamps"]]  # type: ignore[attr-defined]


async def test_words_come_with_the_audio() -> None:
    answer, told = await lines({"response_format": "pcm", "return_timestamps": True})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert "x-ignored" not in answer.headers
    assert b"".join(base64.b64decode(str(line["audio"])) for line in told) == pcm_of(followed())
    assert words(told) == FOLLOWED_TEXT.split()
    times = [word for line in told for word in line["timestamps"]]  # type: ignore[attr-defined]
    assert [word["start_time"] for word in times] == [ms / 1000 for ms in FOLLOWED_MS]
    assert times[-1]["end_time"] == pytest.approx(0.88)
    assert all(before["end_time"] <= after["start_time"] for before, after in pairwise(times))


async def test_times_are_those_of_the_audio_as_it_is_played() -> None:
    _, told = await lines({"response_format": "pcm", "speed": 2.0})
    last = [word for line in told for word in line["timestamps"]][-1]  # type: ignore[attr-defined]
    assert last["end_time"] == pytest.approx(0.44)


async def test_one_object() -> None:
    answer, (told,) = await lines({"stream": False})
    assert answer.headers["content-type"] == "application/json"
    assert told["audio_format"] == "mp3"
    assert decode(base64.b64decode(str(told["audio"])))[0].size > 0
    assert words([told]) == FOLLOWED_TEXT.split()


async def test_what_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, json={"input": FOLLOWED_TEXT, "voice": "nobody"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "voice")
