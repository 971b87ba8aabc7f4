"""Properties of characters: which ones can be spoken, and where text may be split."""

import re
import unicodedata
from itertools import groupby

CJK = r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u3000-\u303f\uff00-\uff65]"
_IDEOGRAPH = re.compile(CJK)
_MARKS = re.compile(r"[^\w\s]{31,}")  # no letter carries this many combining marks
_HIDDEN = ("Cc", "Cf")


def clean(text: str) -> str:
    """Normalize to NFC, remove control and format (zero-width) characters, collapse whitespace, and strip both ends."""
    if not text.isprintable():
        hidden = {ord(char): None for char in set(text) if not char.isspace() and unicodedata.category(char) in _HIDDEN}
        text = text.translate(hidden)
    return " ".join(unicodedata.normalize("NFC", _MARKS.sub(_in_order, text)).split())


def letters(text: str) -> str:
    """Normalize to NFKC and remove combining marks."""
    return unicodedata.normalize("NFKC", "".join(char for char in text if unicodedata.category(char)[0] != "M"))


def _in_order(marks: re.Match[str]) -> str:
    """Sort combining marks in canonical order. Otherwise Python's NFC takes time quadratic in the number of marks."""
    decomposed = "".join(unicodedata.normalize("NFD", char) for char in marks[0])
    runs = groupby(decomposed, lambda char: unicodedata.combining(char) > 0)
    return "".join("".join(sorted(run, key=unicodedata.combining) if are_marks else run) for are_marks, run in runs)


def is_speakable(text: str) -> bool:
    """Return whether text contains any letters or numbers."""
    return any(unicodedata.category(char)[0] in "LN" for char in text)


def repair_surrogates(text: str) -> str:
    """Join surrogate pairs into characters, and replace unpaired surrogates."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_ideograph(char: str) -> bool:
    """Return whether `char` belongs to a script without spaces between words."""
    return _IDEOGRAPH.match(char) is not None
