"""Kokoro-FastAPI's route, and fields as other servers spell them."""

import base64
import json
from dataclasses import replace

import httpx
import pytest

from serve_app.extensions.other_servers.spellings import SpellingHooks
from tests.serve_app.audio.test_formats import decode
from tests.serve_app.extensions.client import Json
from tests.serve_app.fake import CUSTOM_VOICE, FOLLOWED_TEXT, FakeSynthesizer, followed, pcm_of
from tests.serve_app.one_model import posted

pytestmark = pytest.mark.anyio

PATH = "/dev/captioned_speech"


async def lines(body: Json) -> tuple[httpx.Response, list[Json]]:
    synthesizer = FakeSynthesizer(replace(CUSTOM_VOICE, word_times=True), followed())
    answer = await posted(synthesizer, PATH, json={"input": FOLLOWED_TEXT, "voice": "alloy", **body})
    assert answer.status_code == 200, answer.text
    assert synthesizer.requests[0].word_times
    return answer, [json.loads(line) for line in answer.text.splitlines()]


def words(told: list[Json]) -> list[Json]:
    return [word for line in told for word in line["timestamps"]]


async def test_words_come_with_the_audio() -> None:
    answer, told = await lines({"response_format": "pcm", "return_timestamps": True})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert "x-ignored" not in answer.headers
    assert b"".join(base64.b64decode(str(line["audio"])) for line in told) == pcm_of(followed())


async def test_times_are_those_of_the_audio_as_it_is_played() -> None:
    _, told = await lines({"response_format": "pcm", "speed": 2.0})
    assert words(told)[-1]["end_time"] == pytest.approx(0.44)


async def test_one_object() -> None:
    answer, (told,) = await lines({"stream": False})
    assert answer.headers["content-type"] == "application/json"
    assert told["audio_format"] == "mp3"
    assert decode(base64.b64decode(str(told["audio"])))[0].size > 0
    assert [word["word"] for word in words([told])] == FOLLOWED_TEXT.split()


@pytest.mark.parametrize(
    ("sent", "ours"),
    [
        ({"model": "tts-1-hd-zh"}, {"model": "tts-1-hd", "language": "zh"}),
        ({"model": "tts-1-de", "language": "en"}, {"model": "tts-1", "language": "en"}),
        ({"model": "tts-1-xx"}, {"model": "tts-1-xx"}),
        ({"lang_code": "z"}, {"language": "zh"}),
        ({"lang_code": "z", "language": "en"}, {"lang_code": "z", "language": "en"}),
        ({"instruction": "Sad.", "instructions": "Glad."}, {"instruction": "Sad.", "instructions": "Glad."}),
        ({"model": 5}, {"model": 5}),
    ],
)
def test_fields_of_other_servers(sent: dict[str, object], ours: dict[str, object]) -> None:
    assert SpellingHooks().translate(sent) == (ours, {})
