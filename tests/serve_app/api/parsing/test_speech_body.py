"""Fields as they are sent."""

import json

import pytest

from serve_app.api.parsing.client_input import parse_object


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
