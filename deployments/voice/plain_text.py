"""Text as people and language models write it, on one line of plain characters without markup."""

# ruff: noqa: RUF001 (characters that look like others are what this file is about)

import re
import unicodedata
from functools import lru_cache

_FOLDED = {
    **dict.fromkeys("‘’‚‛′ʼ´", "'"),
    **dict.fromkeys("“”„‟″«»", '"'),
    **dict.fromkeys("—―⸺", " - "),
    **dict.fromkeys("•·‣", ", "),
    **dict.fromkeys("。｡।", ". "),
    **dict.fromkeys("、，､؛；", ", "),
    **dict.fromkeys("™®©", " "),
    **{kept: kept for kept in "£€¥₹°μ"},
    "؟": "?", "\u2212": "-", "…": "... ", "×": " times ", "÷": " divided by ", "±": " plus or minus ",
    "≈": " about ", "≠": " is not equal to ", "≤": " at most ", "≥": " at least ", "→": " to ", "§": " section ",
    "№": "No. ", "²": " squared", "³": " cubed", "⁄": "/", "ß": "ss", "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe",
    "ø": "o", "Ø": "O", "đ": "d", "Đ": "D", "ł": "l", "Ł": "L", "þ": "th", "Þ": "Th", "ð": "d", "Ð": "D", "ı": "i",
}  # fmt: skip

_MARKUP = (
    (re.compile(r"```\w*"), "\n"),
    (re.compile(r"!?\[([^\[\]]*)\]\([^()\[\]]*\)"), r" \1 "),  # links and images leave their text
    (re.compile(r"</?[A-Za-z][^<>]*>|<\|[^<>|]*\|>"), " "),
    (re.compile(r"(?<!\S)[:;=]-?[)(DPp](?!\S)"), " "),
)
_LINE_MARK = re.compile(r"\s*+(?:>\s*+)*+(?:#{1,6}\s++|[-*+]\s++(?:\[[ xX]\]\s++)?|\d{1,3}\)\s++)?")
_WORD = re.compile(r"[^\W_]")

_TOP_LEVELS = "com|org|net|io|ai|dev|app|edu|gov|co|uk|eu|de"
_ADDRESSES = (
    re.compile(r"(?<![\w@/.])(?:https?://|www\.)[^\s<>\"'()\[\]{}|\\^`*]+(?<![.,;:!?])"),
    re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    re.compile(rf"(?<![\w.@-])(?:[A-Za-z0-9-]+\.)+(?:{_TOP_LEVELS})\b(?:/[\w/.-]*\w)?"),
)
_SCHEME = re.compile(r"^(?:https?://)?(?:www\.)?")
_SPELLED_LABEL = re.compile(r"(?<=\.)(?:ai|eu|io|uk|de)\b")
_IN_ADDRESSES = {".": " dot ", "@": " at ", "/": " slash ", "-": " dash ", "_": " underscore ", "+": " plus "}

_PUNCTUATION = (
    (re.compile(r"(?<=\d)'s\b"), "s"),
    (re.compile(r"[-=]+>"), " to "),
    (re.compile(r"\((\d{3})\) ?(?=\d)"), r" \1 "),
    (re.compile(r"[()\[\]{}|]"), ", "),
    (re.compile(r"(?<=\d) ?\* ?(?=\d)"), " times "),
    (re.compile(r"~(?=[$£€¥₹]?\d)"), " about "),
    (re.compile(r"\*"), ""),
    (re.compile(r'["`_~^]'), " "),
)


def plain_line(text: str) -> str:
    """`text` in ASCII and the signs £€¥₹°μ, on one line.

    Accents, emphasis, links, code fences, tags and emoji go, other scripts become spaces, web and mail addresses
    words, list items and headings sentences, brackets commas.
    """
    text = _join_lines(_substitute("".join(map(_fold, text)), _MARKUP))
    for address in _ADDRESSES:
        text = address.sub(_speak_address, text)
    return _substitute(text, _PUNCTUATION)


def is_marked(line: str) -> bool:
    """Whether a line begins as list items, headings and quotations do: it ends like a sentence."""
    line = _substitute("".join(map(_fold, line)), _MARKUP).strip()
    return _LINE_MARK.sub("", line, count=1).strip() != line


@lru_cache(maxsize=4096)
def _fold(char: str) -> str:
    if char.isascii() and char.isprintable():
        return char
    if char in _FOLDED:
        return _FOLDED[char]
    category = unicodedata.category(char)
    if char.isspace():
        return " " if category == "Zs" or char == "\t" else "\n"
    if category in ("Cc", "Cf", "Mn", "Me"):
        return ""
    if category == "Nd":
        return str(unicodedata.decimal(char))
    if category == "Pd":
        return "-"
    plain = unicodedata.normalize("NFKD", char)
    return " " if plain == char else (" " if "⁄" in plain else "") + "".join(map(_fold, plain))


def _substitute(text: str, rules: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _join_lines(text: str) -> str:
    """One line; paragraphs, headings and list items end like sentences."""
    parts: list[str] = []
    pause = False
    for line in text.split("\n"):
        content = _LINE_MARK.sub("", line, count=1).strip()
        if not _WORD.search(content):  # an empty line, or a drawn one
            pause = True
            continue
        marked = content != line.strip()
        if parts and (pause or marked):
            parts.append(".")
        parts.append(content)
        pause = marked
    return " ".join(parts)


def _speak_address(match: re.Match[str]) -> str:
    address = _SCHEME.sub("", match[0]).split("?")[0].split("#")[0].rstrip("/")
    address = _SPELLED_LABEL.sub(lambda label: label[0].upper(), address)
    return "".join(_IN_ADDRESSES.get(char, char) for char in address)
