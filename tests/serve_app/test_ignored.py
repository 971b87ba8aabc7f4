from dataclasses import replace

import pytest

from deployments.protocol import ModelInfo
from serve_app.ignored import Ignored, header, ignored
from serve_app.speech_request import parse_speech
from tests.serve_app.fake import BASE, CUSTOM_VOICE, FOLLOWED, VOICE_DESIGN

EMBEDDED = replace(CUSTOM_VOICE, languages=("english",), supports_instructions=False, spoken_form="english")


def of(info: ModelInfo, **fields: object) -> Ignored:
    sent = {"input": "Hello.", **fields}
    return ignored(sent, parse_speech(sent), info)


@pytest.mark.parametrize(
    ("info", "fields", "names"),
    [
        (CUSTOM_VOICE, {"voice": "ryan", "instructions": "Softly.", "sample_rate": 24000, "temperature": 0.5}, set()),
        (CUSTOM_VOICE, {"ref_text": "Hi.", "x_vector_only_mode": False}, {"ref_text", "x_vector_only_mode"}),
        (CUSTOM_VOICE, {"text": "Bye.", "speaker": "ryan", "voice": "dylan"}, {"text", "speaker"}),
        (CUSTOM_VOICE, {"do_sample": False, "top_k": 5, "subtalker_top_k": 5}, {"top_k"}),
        (CUSTOM_VOICE, {"subtalker_dosample": False, "subtalker_top_p": 0.5, "top_p": 0.5}, {"subtalker_top_p"}),
        (CUSTOM_VOICE, {"input": "<b>今天</b>"}, set()),
        (VOICE_DESIGN, {"voice": "alloy", "instructions": "Softly."}, {"voice"}),
        (BASE, {"voice": "alloy", "instructions": "Softly."}, {"voice", "instructions"}),
        (BASE, {"ref_text": "Hi.", "x_vector_only_mode": True}, {"ref_text"}),
        (BASE, {"ref_text": "Hi."}, set()),
        (EMBEDDED, {"instructions": ""}, set()),
        (EMBEDDED, {"word_timestamps": True}, {"word_timestamps"}),
        (FOLLOWED, {"word_timestamps": True}, set()),
        (EMBEDDED, {"input": "Hello 今天."}, {"input"}),
        (EMBEDDED, {"language": "fr", "any_language": True}, {"language"}),
        (EMBEDDED, {"input": "Guten Morgen!"}, {"language"}),
        (EMBEDDED, {"input": "Guten Morgen!", "any_language": True}, set()),
        (CUSTOM_VOICE, {"input": "Good morning!"}, set()),
    ],
)
def test_what_has_no_effect_on_this_model(info: ModelInfo, fields: dict[str, object], names: set[str]) -> None:
    assert set(of(info, **fields)) == names


@pytest.mark.parametrize("name", ["Voice_", "stream_fromat", "instrucions", "max_new_token"])
def test_a_slip_of_the_pen_is_recognised(name: str) -> None:
    assert "did you mean" in of(CUSTOM_VOICE, **{name: 1})[name]


def test_hostile_names_fit_a_header() -> None:
    reasons = of(CUSTOM_VOICE, **{"\r\nx: y\0é" * 100: 1, **{f"field{number}": 1 for number in range(100)}})
    assert reasons["others"] == "93 more"
    [line] = header(reasons).values()
    assert len(line) < 1000
    assert line.isascii()
    assert line.isprintable()


def test_no_header_where_nothing_was_ignored() -> None:
    assert header(of(CUSTOM_VOICE)) == {}
