"""Fields as other servers spell them."""

import pytest

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
