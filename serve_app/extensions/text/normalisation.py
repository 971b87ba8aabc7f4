"""Text normalization: writes numbers, symbols and abbreviations as words if the request enables it.

English uses the embedded voice's rules, and Chinese and Japanese use wetext. Other languages use the rules in
`figures/` and num2words. Text far from any number or symbol is left unchanged.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from difflib import SequenceMatcher
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import yaml
from num2words import num2words

from deployments.embedded_voice.english import roman_value, spoken_english
from deployments.embedded_voice.live_english import TextPart
from deployments.errors import InvalidRequest
from serve_app.distribution import pip_install
from serve_app.text.languages import language_code

_FOLDER = Path(__file__).parent / "figures"
_HARD = re.compile(r"[\d%‰€$£¥￥₩₽°º℃№&§+½¼¾²³㎡]|\b[IVXLC]++(?:e|er|re|ème)?\b")
_WORDS, _CHARACTERS = re.compile(r"\s*+\S{1,64}|\s++"), re.compile(r"\s*+\S|\s++")
_NEAR_WORDS, _NEAR_CHARACTERS = 2, 8  # minimum distance from a cut to any text to normalise, on both sides
_LONGEST_RUN = 240  # maximum number of characters to normalise at once
_LONGEST_NUMBER = 15  # digits; longer numbers are read digit by digit
_MACRO = re.compile(r"<(\w+)>")
_BLANK = re.compile(r"\{(\d)(?::([^{}]*))?\}")
_MINUS = ("-", "\u2212")
_SHORTENED = re.compile(r"[A-Za-z]{1,4}\.$")

Read = Callable[[str], list[TextPart]]


class LiveNormaliser:
    """Normalises text that arrives incrementally. Where the text is split does not affect the result."""

    def __init__(self, language: str) -> None:
        """`language` must be a language that `prepare` accepts."""
        self._read, self._hard_words = _reader(language)
        is_wide = language in ("chinese", "japanese")
        self._atoms, self._near = (_CHARACTERS, _NEAR_CHARACTERS) if is_wide else (_WORDS, _NEAR_WORDS)
        self._rest = ""

    def feed(self, text: str, *, is_last: bool) -> list[TextPart]:
        """Return the normalised text that later text cannot change, or all remaining text if `is_last`."""
        self._rest += text
        atoms = [match.span() for match in self._atoms.finditer(self._rest)]
        complete = len(atoms) if is_last else len(atoms) - 1
        hard = [self._is_hard(self._rest[start:end]) for start, end in atoms]
        parts: list[TextPart] = []
        begun = 0
        for number in range(1, complete):
            is_long = atoms[number][1] - atoms[begun][0] > _LONGEST_RUN
            if not is_long and not is_last and number + self._near > complete:
                break
            if is_long or not any(hard[max(begun, number - self._near) : number + self._near]):
                parts += self._unit(self._rest[atoms[begun][0] : atoms[number][0]], any(hard[begun:number]))
                begun = number
        if is_last and atoms:
            parts += self._unit(self._rest[atoms[begun][0] :], any(hard[begun:]))
        self._rest = "" if is_last or not atoms else self._rest[atoms[begun][0] :]
        return parts

    def _unit(self, text: str, is_hard: bool) -> list[TextPart]:
        return self._read(text) if is_hard else [TextPart(text, text)]

    def _is_hard(self, atom: str) -> bool:
        return _HARD.search(atom) is not None or self._hard_words(atom.strip(' \n\t(«»„“”",;:!?)'))


def prepare(language: str) -> None:
    """Load the rules for a language. Blocks for up to a second. Raises InvalidRequest if it has none."""
    if language_code(language) is None:
        raise InvalidRequest(f"text_normalization: {language[:80]!r} is not supported.", "text_normalization")
    for part in LiveNormaliser(language).feed("1", is_last=True):
        assert part.spoken


@lru_cache
def _reader(language: str) -> tuple[Read, Callable[[str], bool]]:
    """Return a function that normalises text, and one that detects text to normalise that has no digits."""
    if language == "english":
        return _read_english, lambda word: _SHORTENED.search(word) is not None
    code = language_code(language)
    assert code is not None, "prepare rejects unknown languages"
    if code in ("zh", "ja"):
        return _wetext(language, code), lambda _: False
    readings = Readings(code)
    return readings.read, lambda word: word in readings.short_words or readings.short.match(word) is not None


def _wetext(language: str, code: str) -> Read:
    if find_spec("wetext") is None:
        how = pip_install("wetext")
        message = f"text_normalization: {language.title()} requires the package wetext. Install it: {how}."
        raise InvalidRequest(message, "text_normalization", "extra_not_installed")
    from wetext import Normalizer  # imported late, because its model takes up memory

    normalizer = Normalizer(lang=code, operator="tn")

    def read(text: str) -> list[TextPart]:
        core = text.strip()
        start = text.index(core)
        try:
            spoken = normalizer.normalize(core)
        except (AssertionError, RuntimeError):  # wetext cannot normalise some texts
            return [TextPart(text, text)]
        return _aligned(text, text[:start] + spoken + text[start + len(core) :], _CHARACTERS)

    return read


def _read_english(text: str) -> list[TextPart]:
    core = text.rstrip()
    spoken = spoken_english(f"{core} so").removesuffix("so.").rstrip()  # `text` does not end a sentence
    spoken += "." * (core.endswith(".") and not spoken.endswith("."))
    start = len(core) - len(core.lstrip())
    return _aligned(text, core[:start] + spoken + text[len(core) :], _WORDS)


def _aligned(written: str, spoken: str, atoms: re.Pattern[str]) -> list[TextPart]:
    """Pair the `atoms` that both texts have in common, and the texts between them."""
    before, behind = (atoms.findall(text) for text in (written, spoken))
    parts: list[TextPart] = []
    for kind, start, end, first, last in SequenceMatcher(None, before, behind, autojunk=False).get_opcodes():
        if kind == "equal":
            parts += [TextPart(word, word) for word in before[start:end]]
        else:
            parts.append(TextPart("".join(before[start:end]), "".join(behind[first:last])))
    return parts


class Readings:
    """Normalization rules for one language, read from its file in `figures/`."""

    def __init__(self, code: str) -> None:
        self._code = code
        given: dict[str, Any] = yaml.safe_load((_FOLDER / f"{code}.yaml").read_text("utf-8"))
        self._given = given
        self._decimal, self._point = given["decimal"]  # written and spoken form
        self._tables: dict[str, dict[str, str]] = {
            name: {str(key): said for key, said in table.items()} for name, table in given["tables"].items()
        }
        self.short_words = {word for key in self._tables.get("abbreviations", ()) for word in key.split()}
        self.short = re.compile(given.get("short", "(?!)"))
        rules = given["rules"]
        patterns = (f"(?P<r{number}>{_MACRO.sub(self._macro, rule[0])})" for number, rule in enumerate(rules))
        self._pattern = re.compile("|".join(patterns))
        self._spoken = {f"r{number}": str(rule[1]) for number, rule in enumerate(rules)}

    def read(self, text: str) -> list[TextPart]:
        parts: list[TextPart] = []
        at = 0
        for match in self._pattern.finditer(text):
            parts += [TextPart(text[at : match.start()], text[at : match.start()])] if match.start() > at else []
            parts.append(TextPart(match[0], self._say(match)))
            at = match.end()
        return parts + ([TextPart(text[at:], text[at:])] if at < len(text) else [])

    def _macro(self, macro: re.Match[str]) -> str:
        """Return the pattern for a macro: `<n>` matches a number, and `<TABLE>` matches an entry of this table."""
        if macro[1] == "n":
            group, point = self._given["group"], re.escape(self._decimal)
            digits = rf"(?:\d{{1,3}}(?:{group}\d{{3}})++(?!\d)|\d++)(?:{point}\d++)?"
            return rf"(?<![\d{point}])(?<!\d[.,])((?:(?<![\w.,\-])[{''.join(_MINUS)}])?{digits})(?!{point}?\d)"
        entries = sorted(self._tables[macro[1]], key=len, reverse=True)
        return f"({'|'.join(map(re.escape, entries))})"

    def _say(self, match: re.Match[str]) -> str:
        rule = match.lastgroup
        assert rule is not None, "each rule is a named group"
        first = match.re.groupindex[rule]

        def fill(blank: re.Match[str]) -> str:
            """Return the words for a group: a number, an entry of a table, or a form. See README.md in `figures/`."""
            written = match[first + int(blank[1])] or ""
            kind = blank[2]
            if kind is None:
                return written
            if "|" in kind:
                return self._form(kind, self._value(written))
            table, _, counted = kind.partition("/")
            if table in self._tables:
                number = match[first + int(counted)] if counted else ""
                return self._form(self._tables[table][written], self._value(number))
            return self._number(written, *kind.partition(".")[::2])

        said = _BLANK.sub(fill, self._spoken[rule])
        return said + "." * (match[0].endswith(".") and match.end() == len(match.string.rstrip()))

    def _form(self, forms: str, number: Decimal) -> str:
        """Return the singular or plural form of a noun that follows a number."""
        known, plural = forms.split("|"), self._given.get("plural")
        if len(known) == 1:
            return known[0]
        if plural == "ru":
            if number != int(number):
                return known[1]
            last, two = int(abs(number)) % 10, int(abs(number)) % 100
            return known[2 if not 1 <= last <= 4 or 11 <= two <= 14 else last > 1]
        return known[abs(number) >= 2 if plural == "fr" else abs(number) != 1]

    def _value(self, written: str) -> Decimal:
        integer, _, fraction = (re.sub(r"\D", "", digits) for digits in written.partition(self._decimal))
        return Decimal(f"{'-' if written.startswith(_MINUS) else ''}{integer or 0}.{fraction or 0}")

    def _number(self, written: str, name: str, variant: str) -> str:
        if name in ("r", "ro"):
            written, name = str(roman_value(written)), "o" if name == "ro" else "n"
        digits = re.sub(r"\D", "", written)
        if name == "t":
            return f" {self._number(written, 'n', variant)}" if digits.strip("0") else ""
        if name == "d" or (name == "z" and digits[0] == "0") or len(digits) > _LONGEST_NUMBER:
            return " ".join(self._varied("cardinal", int(digit), variant) for digit in digits)
        value = self._value(written)
        if name == "n" and value != int(value):
            return self._decimal_number(written, value, variant)
        return self._varied({"o": "ordinal", "y": "year"}.get(name, "cardinal"), int(value), variant)

    def _varied(self, kind: str, number: int | Decimal, variant: str) -> str:
        changes = self._given["variants"].get(variant, [])
        options = changes if isinstance(changes, dict) else {}
        said = cast("str", num2words(number, lang=self._code, to=kind, **options))
        for pattern, becomes in () if options else changes:
            said = re.sub(pattern, becomes, said)
        return said

    def _decimal_number(self, written: str, value: Decimal, variant: str) -> str:
        kind = self._given.get("fraction")
        minus = f"{self._varied('cardinal', -1, '').split()[0]} " if value < 0 else ""  # num2words omits it in -0.5
        if kind == "library":
            return f"{minus}{self._varied('cardinal', abs(value), variant)}"
        fraction = written.partition(self._decimal)[2]
        is_whole = kind == "whole" and len(fraction) <= 2 and fraction[0] != "0"
        behind = self._number(fraction, "n", "") if is_whole else self._number(fraction, "d", "")
        return f"{minus}{self._varied('cardinal', int(abs(value)), '')} {self._point} {behind}"
