"""English words of numbers, as a reader says them."""

from collections.abc import Callable

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_ROUND = "twenty thirty forty fifty sixty seventy eighty ninety"
_ONES, _TENS = _SMALL.split(), _ROUND.split()
_SCALES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (10**3, "thousand"), (100, "hundred"))
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}

LARGEST_DIGITS = 15  # of an integer that is read as a whole: hundreds of trillions
_PLAIN_DIGITS = 6  # longer digit strings without separators are codes, unless they are round


def cardinal(number: int) -> str:
    """`0 <= number < 10**LARGEST_DIGITS`, without "and": one hundred five."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    size, name = next(scale for scale in _SCALES if number >= scale[0])
    head, rest = divmod(number, size)
    return f"{cardinal(head)} {name}" + (f" {cardinal(rest)}" if rest else "")


def ordinal(number: int) -> str:
    """Twenty-first for 21; the range is `cardinal`'s."""
    return _inflect_last(cardinal(number), lambda word: _ORDINALS.get(word) or _regular_ordinal(word))


def plural(words: str) -> str:
    """The last word in the plural, as in nineteen nineties."""
    return _inflect_last(words, lambda word: word[:-1] + "ies" if word.endswith("y") else word + "s")


def year(number: int) -> str:
    """Nineteen oh five, two thousand five, twenty twenty-six; outside 1100 to 2099 the cardinal."""
    century, rest = divmod(number, 100)
    if not 1100 <= number < 2100 or 2000 <= number < 2010:
        return cardinal(number)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def digits(figures: str) -> str:
    """One word a digit; anything between them is left out."""
    return " ".join(_ONES[int(figure)] for figure in figures if figure.isdigit())


def integer(figures: str) -> str:
    """A digit string, with or without thousands separators.

    Numbers with a leading zero, and long ones that are neither separated nor round, are codes: digit by digit.
    """
    plain = figures.replace(",", "")
    long = len(plain) > _PLAIN_DIGITS and plain == figures and not plain.endswith("000")
    if len(plain) > LARGEST_DIGITS or long or (plain[0] == "0" and len(plain) > 1):
        return digits(plain)
    return cardinal(int(plain))


def decimal(figures: str) -> str:
    """An integer, or one with decimals: three point one four. Further points are read too."""
    whole, *parts = figures.split(".")
    return " point ".join((integer(whole or "0"), *(digits(part) for part in parts)))


def _inflect_last(words: str, inflect: Callable[[str], str]) -> str:
    """`words` with its last word, which may stand behind a hyphen, inflected."""
    start = max(words.rfind(" "), words.rfind("-")) + 1
    return words[:start] + inflect(words[start:])


def _regular_ordinal(word: str) -> str:
    return word[:-1] + "ieth" if word.endswith("y") else word + "th"
