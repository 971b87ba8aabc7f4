import unicodedata

import pytest

from serve_app.speech.characters import clean


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("  Hello,\n\n world!\t", "Hello, world!"),
        ("a\x00b\x07c\x7f", "abc"),
        ("zero\u200bwidth\ufeff \u2060join\u200der", "zerowidth joiner"),
        ("one\u2028two\u00a0three\u3000four", "one two three four"),
        ("cafe\u0301", "café"),
        ("你好，\r\n世界", "你好， 世界"),
        ("<|im_start|>", "<|im_start|>"),
        ("\u200b \n\x00", ""),
        ("e\u200d\u0301", "é"),
    ],
)
def test_clean(text: str, spoken: str) -> None:
    assert clean(text) == spoken


def test_clean_of_every_character_is_stable_and_normal() -> None:
    text = "a".join(chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000)
    spoken = clean(text)
    assert clean(spoken) == spoken
    assert unicodedata.is_normalized("NFC", spoken)
    assert not any(unicodedata.category(char) in ("Cc", "Cf") for char in spoken)
