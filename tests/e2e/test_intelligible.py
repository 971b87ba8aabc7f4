"""What is heard is what was asked for: the embedded voice through the whole application, written down by Whisper."""

import aiohttp
import numpy as np
import pytest

from tests.e2e.speech import body, fetch, samples, within_one_lsb
from tools.demo_voice.transcriber import Transcriber, plain_words, word_errors

pytestmark = pytest.mark.anyio

SENTENCES = {
    "nora": "Good morning, how can I help you today?",
    "felix": "The train to the city leaves in 15 minutes.",
    "iris": "Please leave a message after the tone.",
    "hugo": "We will send the report on Monday evening.",
}
WORD_ERRORS = 0.25  # of all words; a voice that lost its text gets more than all of them wrong


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    return Transcriber()


@pytest.mark.parametrize("whole_text", [True, False])
async def test_sentences_are_understood_streamed_and_whole(
    http: aiohttp.ClientSession, transcriber: Transcriber, whole_text: bool
) -> None:
    errors = words = 0
    for voice, sentence in SENTENCES.items():
        asked = body(sentence, voice=voice, non_streaming_mode=whole_text, seed=5)
        streamed = await fetch(http, asked | {"stream": True})
        assert within_one_lsb(streamed, await fetch(http, asked | {"stream": False}))
        heard = transcriber.transcribe(samples(streamed).astype(np.float32) / 32768, 24000)
        wanted = plain_words(sentence)
        errors += word_errors(wanted, plain_words(heard))
        words += len(wanted)
    assert errors <= WORD_ERRORS * words


async def test_every_voice_is_described(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/audio/voices") as answer:
        voices = (await answer.json())["voices"]
    assert len(voices) > 4
    assert [voice for voice in voices if not (voice["language"] and voice["gender"] and voice["description"])] == []
