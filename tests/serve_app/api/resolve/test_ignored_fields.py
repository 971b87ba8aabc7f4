import difflib
from collections import Counter
from dataclasses import replace

import httpx
import pytest

from deployments.protocol import ModelInfo
from serve_app.api.parsing.speech_body import SpeechBody, names_of, parse_speech, with_fields
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.ignored_fields import (
    Ignored,
    Reasons,
    as_header,
    left_out,
    of_text,
    with_unknown,
    without_effect,
)
from serve_app.api.voice_source import ChosenVoice
from serve_app.config import ApiSettings
from serve_app.extensions.live.connection import always_streamed
from serve_app.extensions.text.spoken_text import TextRules, read
from serve_app.extensions.voices.library import Voices
from serve_app.extensions.voices.settings import RecordingFields, VoiceSettings
from serve_app.text.languages import spoken_language
from tests.serve_app.extensions.client import heard
from tests.serve_app.fake import BASE, CUSTOM_VOICE, FOLLOWED, VOICE_DESIGN, FakeSynthesizer
from tools.suites.rows import SOCKETS, here

pytestmark = pytest.mark.anyio

KIND = with_fields(SpeechBody, RecordingFields)
EMBEDDED = replace(CUSTOM_VOICE, languages=("english",), supports_instructions=False, spoken_form="english")


def of(info: ModelInfo, **fields: object) -> Reasons:
    sent = {"input": "Hello.", **fields}
    body = parse_speech(KIND, sent, ApiSettings())
    spoken = read(body.input, TextRules("auto", spoken_form=info.spoken_form))
    language = spoken_language(body.language, info.languages, default=None)
    voice = ChosenVoice(body.voice, language=language)
    unused = dict(without_effect(body, info, voice=voice, instructions=body.instructions))
    unused |= Voices(None, VoiceSettings()).unused(body, info, voice)
    return Ignored(sent, names_of(KIND), {}).by_client_name(unused | of_text(spoken), {})


@pytest.mark.parametrize(
    ("info", "fields", "names"),
    [
        (CUSTOM_VOICE, {"voice": "ryan", "instructions": "Softly.", "sample_rate": 24000, "temperature": 0.5}, set()),
        (CUSTOM_VOICE, {"ref_text": "Hi.", "x_vector_only_mode": False}, {"ref_text", "x_vector_only_mode"}),
        (CUSTOM_VOICE, {"text": "Bye.", "speaker": "ryan", "voice": "dylan"}, {"text", "speaker"}),
        (CUSTOM_VOICE, {"do_sample": False, "top_k": 5, "subtalker_top_k": 5}, {"top_k"}),
        (CUSTOM_VOICE, {"subtalker_dosample": False, "subtalker_top_p": 0.5, "top_p": 0.5}, {"subtalker_top_p"}),
        (CUSTOM_VOICE, {"input": "<b>今天</b>"}, {"input"}),
        (VOICE_DESIGN, {"voice": "alloy", "instructions": "Softly."}, {"voice"}),
        (BASE, {"voice": "alloy", "instructions": "Softly."}, {"voice", "instructions"}),
        (BASE, {"ref_text": "Hi.", "x_vector_only_mode": True}, {"ref_text"}),
        (BASE, {"ref_text": "Hi.", "prepare": "auto"}, set()),
        (replace(BASE, clones_by_vector=True), {"ref_text": "Hi.", "prepare": "auto"}, {"ref_text"}),
        (CUSTOM_VOICE, {"prepare": "none"}, {"prepare"}),
        (EMBEDDED, {"instructions": ""}, set()),
        (EMBEDDED, {"word_timestamps": True}, set()),
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


def test_neighbours_of_a_nested_field_are_no_slips() -> None:
    told = with_unknown(("a.style", "a.sped", "speed"), ("a.speed", "voice"), {})
    meant = "unknown field, did you mean a.speed?"
    assert told == {"a.style": "not supported", "a.sped": meant, "speed": meant}


def test_hostile_names_fit_a_header() -> None:
    reasons = of(CUSTOM_VOICE, **{"\r\nx: y\0é" * 100: 1, **{f"field{number}": 1 for number in range(100)}})
    assert reasons["others"] == "93 more"
    [line] = as_header(reasons).values()
    assert len(line) < 1000
    assert line.isascii()
    assert line.isprintable()


@pytest.mark.parametrize(
    ("kinds", "told"), [(8, ", kind7 2"), (9, ", kind7 2 and 1 more"), (11, ", kind7 2 and 3 more")]
)
def test_kinds_of_text_beyond_the_eighth_are_counted(kinds: int, told: str) -> None:
    spoken = replace(read("", TextRules("auto")), left_out=Counter({f"kind{number}": 2 for number in range(kinds)}))
    assert left_out(spoken.left_out).endswith(told)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"stream": False, "stream_format": "SSE"}, {"stream", "stream_format"}),
        ({"stream": " False", "previous_request_id": "x"}, {"stream", "previous_request_id"}),
        ({"stream": True, "stream_format": "audio", "previous_request_id": None}, set()),
    ],
)
def test_what_has_no_effect_on_a_socket(fields: dict[str, object], names: set[str]) -> None:
    assert set(always_streamed(fields)) == names


def test_no_header_where_nothing_was_ignored() -> None:
    assert as_header(of(CUSTOM_VOICE)) == {}


MANY = {f"field{number}": 1 for number in range(32_000)}


@pytest.fixture
def matched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were compared with those of fields."""
    names: list[str] = []

    def close_matches(word: str, *args: object, **kwargs: object) -> list[str]:
        names.append(word)
        return difflib.get_close_matches(word, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(ignored_fields, "get_close_matches", close_matches)
    return names


async def test_of_many_unknown_fields_those_named_are_compared(client: httpx.AsyncClient, matched: list[str]) -> None:
    answer = await client.post("/v1/audio/speech", json={"input": "Hello.", "voice": "alloy", **MANY})
    assert answer.status_code == 200
    assert answer.headers["x-ignored"].endswith("others (31992 more)")
    assert len(matched) == 8


TOLD = {"native": "started", "vllm-omni": "audio.start", "nari": "request.configured"}


@pytest.mark.parametrize("name", here(*TOLD))
async def test_so_it_is_on_sockets(synthesizer: FakeSynthesizer, name: str, matched: list[str]) -> None:
    row = SOCKETS[name]
    many = {f"{number:x}": 1 for number in range(12_000)}  # as many as a message has room for
    first, *others = row.speak("Hi.")
    sent, protocols = ({**first, **many}, *others), row.sample.protocols
    (*_, message), _ = await heard(synthesizer, row.path, *sent, until={"type": TOLD[name]}, subprotocols=protocols)
    assert message["ignored"][-1] == {"field": "others", "reason": "11992 more"}
    assert len(message["ignored"]) == 9
    assert len(matched) == 8
