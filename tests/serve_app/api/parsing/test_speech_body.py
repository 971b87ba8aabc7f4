"""Fields as other servers spell them."""

import json

import pytest

from serve_app.api.parsing.client_input import parse_object
from serve_app.api.parsing.speech_body import in_our_spelling


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
    assert in_our_spelling(sent) == ours


@pytest.mark.parametrize(
    ("text", "cut_fields", "kept", "repaired"),
    [
        ("Hi \ud83d", (), "Hi \ufffd", ["p"]),
        ("Hi \ud83d", ("p.text",), "Hi \ud83d", []),  # the next message has the other half
        ("Hi \ud83d.", ("p.text",), "Hi \ufffd.", ["p"]),
        ("Hi \ud83d", ("text",), "Hi \ufffd", ["p"]),
    ],
)
def test_surrogates_stay_in_cut_texts(text: str, cut_fields: tuple[str, ...], kept: str, repaired: list[str]) -> None:
    reported: list[str] = []
    parsed = parse_object(json.dumps({"p": {"text": text}, "q": "x"}), repaired=reported, cut_fields=cut_fields)
    assert (parsed, reported) == ({"p": {"text": kept}, "q": "x"}, repaired)
