import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.text.characters import clean, letters
from tests.processor_time import times_as_long


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


MARKS = [chr(point) for point in range(0x110000) if unicodedata.category(chr(point))[0] == "M"]


SAMPLED = st.sampled_from(["a", " ", "!", "\u1e69", "\u0f73", "\u0344", "\u0323", "\u0301", *MARKS])


@given(text=st.text(SAMPLED, max_size=200))
def test_any_number_of_marks_is_what_nfc_makes_of_them(text: str) -> None:
    assert clean(text) == " ".join(unicodedata.normalize("NFC", text).split())


@pytest.mark.parametrize("unit", ["\u0301\u0323", "\u0f73", "\U0001d165\u0301\u0323"])
def test_the_time_of_many_marks_grows_with_their_number(unit: str) -> None:
    for read in (clean, letters):
        assert times_as_long(read, unit, short=1 << 12, long=1 << 15, limit=16) <= 16, read


def test_clean_of_every_character_is_stable_and_normal() -> None:
    text = "a".join(chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000)
    spoken = clean(text)
    assert clean(spoken) == spoken
    assert unicodedata.is_normalized("NFC", spoken)
    assert not any(unicodedata.category(char) in ("Cc", "Cf") for char in spoken)
