"""Texts that nobody should send."""

import json
import random
import unicodedata
from collections.abc import Callable

from talkray_tools.byte_tokenizer import ADDED_TOKENS

LONGEST = 5000  # a little above the limit

_PLANES = [(plane << 16, (plane << 16) + 0xFFFF) for plane in range(17)]
_BIDI = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u034f\u180e\u3164"
_HEBREW_ARABIC = [chr(code) for code in (*range(0x5D0, 0x5EB), *range(0x620, 0x64B))]
_EMOJI = "🙂🙃😀👍🏽👨\u200d👩\u200d👧🏳\ufe0f\u200d🌈🇩🇪1\ufe0f\u20e3❤\ufe0f"
_MARKS = "".join(chr(code) for code in range(0x300, 0x370))
_SPECIAL_SPACES = "\t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u3000"
_WORDS = (
    "Dr. Smith's 3.14 $1,234.56 https://a.example/b?c=d#e 12:30 1/2 5% 2026-11-21 e.g. ... — (x) [y](z) `c` *d* #1 @f"
)


def _plane(chance: random.Random) -> str:
    low, high = chance.choice(_PLANES)
    return "".join(_valid(chance.randint(low, high)) for _ in range(chance.randint(1, 40)))


def _valid(code: int) -> str:
    return "\ufffd" if 0xD800 <= code <= 0xDFFF else chr(code)


def _control(chance: random.Random) -> str:
    return "".join(chr(chance.choice([*range(0x20), *range(0x7F, 0xA0)])) for _ in range(chance.randint(1, 20)))


def _from(alphabet: str | list[str], most: int) -> Callable[[random.Random], str]:
    return lambda chance: "".join(chance.choice(alphabet) for _ in range(chance.randint(1, most)))


REPEATED = ("a", "1", ".", "-", "(", "'", "$", "/", "é", "水", "🙂", "ﷺ", "<|", "1,", "a.b.", "\u0301", "\u0301\u0323")


def _repeated(chance: random.Random) -> str:
    return chance.choice(REPEATED) * (chance.randint(1, LONGEST // 2))


_MAKERS: tuple[Callable[[random.Random], str], ...] = (
    _plane, _control, _repeated, _from(_BIDI, 10), _from(_INVISIBLE, 10), _from(_HEBREW_ARABIC, 30),
    _from(_EMOJI, 10), _from(_MARKS, 60), _from(_SPECIAL_SPACES, 10), _from(_WORDS, 60),
    _from(_WORDS.split(), 3), _from(list(ADDED_TOKENS), 3),
    lambda chance: str(chance.randint(-(10**40), 10**40)),
    lambda chance: f"{chance.uniform(-1e30, 1e30):.{chance.randint(0, 30)}f}",
    lambda chance: unicodedata.normalize(chance.choice(["NFC", "NFD", "NFKC", "NFKD"]), _plane(chance)),
    lambda _: "", lambda _: "Hello. ",
)  # fmt: skip


FLOODS = ("<", "[", "- a\n", "- a ", "](", "<aaaa ", "a ", "1", "\ud83d", "\ude00", '{"word":"', "\u0301\u0323", "漢")


def flood(chance: random.Random) -> str:
    """64 KiB of one thing, in front of which there may be something that never ends."""
    return (chance.choice(("", "- ", "[ ", "<b ")) + chance.choice(FLOODS) * (1 << 16))[: 1 << 16]


def text(chance: random.Random) -> str:
    """Some pieces behind each other, now and then far too many."""
    pieces = "".join(chance.choice(_MAKERS)(chance) for _ in range(chance.randint(1, 8)))
    return pieces * chance.randint(1, 200) if chance.random() < 0.05 else pieces


def body(chance: random.Random, fields: dict[str, object], content: str) -> bytes:
    """A JSON body with `content` as its input; sometimes broken in ways that only bytes can be."""
    encoded = json.dumps({**fields, "input": content}, ensure_ascii=chance.random() < 0.5).encode()
    match chance.randrange(20):
        case 0:
            return encoded.replace(b'"input": "', b'"input": "' + chance.choice(_ESCAPES))
        case 1:
            return encoded[: chance.randrange(len(encoded))]
        case 2:
            place = chance.randrange(len(encoded))
            return encoded[:place] + chance.randbytes(chance.randint(1, 4)) + encoded[place:]
        case 3:
            return json.dumps({**fields, "input": content}).encode(chance.choice(["utf-16", "utf-32", "utf-8-sig"]))
        case 4:
            return chance.choice(_DOCUMENTS)
    return encoded


# Halves of surrogate pairs, a NUL, escapes that are none.
_ESCAPES = (
    rb"\ud800", rb"\udc00\ud800", rb"\ud83d", rb"\u0000", rb"\uZZZZ", rb"\x00", b"\xff\xfe", b"\xed\xa0\x80",
    b"\0",
)  # fmt: skip
_DOCUMENTS = (
    b"", b"null", b"[" * 100_000, b'{"a":' * 10_000, b'{"input": ' + b"9" * 5000 + b"}", b'{"input": 1e999}',
    b'{"input": NaN}', b'{"input": "x", "seed": ' + b"9" * 400 + b"}",
    b'{"input": "x", "voice": "alloy", "speed": Infinity}',
    b'{"input": "x", "input": "y", "voice": {"id": {"id": "alloy"}}}',
    b'{"__proto__": 1, "input": ["x"]}',
)  # fmt: skip
