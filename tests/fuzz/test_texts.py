import json
import unicodedata
from dataclasses import replace

import pytest

from serve_app.config import ApiSettings
from serve_app.speech.speech_models import SILENCE_S
from tests.fuzz.conftest import Cases
from tests.fuzz.texts import body, text
from tests.serve_app.asgi import Answer, post
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, utterance
from tests.serve_app.one_model import one_api

pytestmark = pytest.mark.anyio

SPEECH = "/v1/audio/speech"
FIELDS: dict[str, object] = {"voice": "alloy", "response_format": "pcm"}


def check(answer: Answer) -> None:
    """Speech, or an error that is the client's and says so in the envelope."""
    if answer.status == 200:
        assert answer.content_type.startswith("audio/")
        return
    assert 400 <= answer.status < 500, answer
    error = json.loads(answer.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


@pytest.mark.parametrize("spoken_form", [None, "english"])
async def test_text_in_a_request(cases: Cases, spoken_form: str | None) -> None:
    """Also of a text that is normalised, and cut into segments."""
    info = replace(CUSTOM_VOICE, spoken_form=spoken_form, max_segment_chars=200)
    synthesizer = FakeSynthesizer(info, utterance(1))
    api = one_api(synthesizer, ApiSettings())
    for chance in cases:
        synthesizer.requests.clear()
        answer = await post(api, SPEECH, body(chance, FIELDS, text(chance)))
        cases.count(answer.status)
        check(answer)
        silence = bytes(2 * int(SILENCE_S * info.sample_rate))  # of text such as "..."
        is_spoken = answer.status == 200 and answer.content != silence
        assert bool(synthesizer.requests) == is_spoken
        for request in synthesizer.requests:
            assert request.text.strip()
            assert request.text.encode()  # no half of a surrogate pair
            assert not any(unicodedata.category(char) == "Cc" for char in request.text)


@pytest.mark.parametrize("field", ["voice", "model", "language", "instructions", "ref_text", "response_format"])
async def test_text_in_other_fields(cases: Cases, field: str) -> None:
    api = one_api(FakeSynthesizer(script=utterance(1)), ApiSettings())
    for chance in cases:
        answer = await post(api, SPEECH, body(chance, {**FIELDS, field: text(chance)}, "Hello"))
        cases.count(answer.status)
        check(answer)


async def test_a_hundred_kilobytes_without_a_space() -> None:
    settings = ApiSettings(max_input_chars=200_000)
    for spoken_form in (None, "english"):
        synthesizer = FakeSynthesizer(replace(CUSTOM_VOICE, spoken_form=spoken_form), utterance(1))
        for piece in ("a", "水", "1", "🙂", "a.", "a\u0301", "(", "👩\u200d"):
            content = json.dumps({**FIELDS, "input": piece * (100_000 // len(piece.encode()))}).encode()
            check(await post(one_api(synthesizer, settings), SPEECH, content))
            assert (await post(one_api(synthesizer, ApiSettings()), SPEECH, content)).status == 400
