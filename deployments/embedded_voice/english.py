"""English text in its spoken form, for voices that have learnt nothing but words and plain punctuation."""

# ruff: noqa: RUF001 (characters that look like others are what a part of this file is about)

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from deployments.embedded_voice.numbers import speak_numbers

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


_ABBREVIATIONS = {
    "Mr": "Mister", "Mrs": "Missus", "Ms": "Miz", "Dr": "Doctor", "mr": "mister", "mrs": "missus",
    "dr": "doctor", "nth": "enth", "St": "Street", "vs": "versus", "etc": "et cetera",
    "Jr": "Junior", "Sr": "Senior", "Inc": "Incorporated", "Ltd": "Limited", "Corp": "Corporation",
    "e.g": "for example", "i.e": "that is", "a.m": "AM", "p.m": "PM", "A.M": "AM", "P.M": "PM", "Ph.D": "P H D",
}  # fmt: skip
_DOTTED_ABBREVIATIONS = {  # without the dot they are other words, or names
    "Prof": "Professor", "Gen": "General", "Sgt": "Sergeant", "Capt": "Captain", "Lt": "Lieutenant", "Rev": "Reverend",
    "Mt": "Mount", "Ft": "Fort", "Ave": "Avenue", "Blvd": "Boulevard", "Rd": "Road",
    "approx": "approximately", "dept": "department", "Dept": "Department",
}  # fmt: skip
_MAY_END_A_SENTENCE = ("etc", "Jr", "Sr", "Inc", "Ltd", "Corp", "a.m", "p.m", "A.M", "P.M", "St", "Ave", "Blvd", "Rd")
_BEFORE_NUMBERS = {
    "No": "number", "Nos": "numbers", "Fig": "figure", "fig": "figure", "Figs": "figures", "Vol": "volume",
    "vol": "volume", "p": "page", "pp": "pages", "Ch": "chapter", "ch": "chapter", "ca": "about", "Sec": "section",
}  # fmt: skip
# Capitals that are read as words. Others of up to five letters are spelled.
_WORDS_IN_CAPITALS = (
    "NASA NATO UNESCO UNICEF OPEC ASAP COVID AIDS SIM PIN RAM ROM GIF JPEG JSON CUDA SWAT LASER RADAR SCUBA FIFA YOLO "
    "AN AND ANY ARE AS BE BEST BIG BUT BY CAN DAY DO EVEN EVER EVERY FOR FREE FROM GET GO GOOD GREAT HAVE HE "
    "HELLO HELP HER HERE HI HIS HOW IF IN IS ITS JUST KNOW LIKE LOOK LOVE MAY ME MORE MOST MUCH MUST MY NEVER NEW NEXT "
    "NO NOT NOTE NOW OF OFF OLD ON ONE ONLY OR OUR OUT OVER READ REAL SALE SAY SEE SHE SO STAY STOP SUCH THAN THAT THE "
    "THEIR THEM THEN THERE THEY THIS TIME TO TODAY TOO TRUE TWO UP VERY WAIT WANT WAS WAY WE WERE WHAT WHEN WHERE WHO "
    "WHY WILL WITH WOW YEAR YES YOU YOUR"
)
_READ_AS_WORDS = frozenset(_WORDS_IN_CAPITALS.split())
_SPELLED_LETTERS = 5
_IN_CAPITALS = {
    "II": "two", "III": "three", "IV": "four", "VI": "six", "VII": "seven", "VIII": "eight", "IX": "nine",
    "OK": "okay",
}  # fmt: skip
_INTERJECTIONS = ("hm", "hmm", "hmmm", "hmph", "mm", "mmm", "sh", "shh", "psst", "tsk", "brr", "grr", "pfft", "zzz")
_SYMBOLS = {
    "&": "and", "+": "plus", "=": "equals", "@": "at", "%": "percent", "/": "slash", "\\": "backslash",
    "$": "dollar", "£": "pound", "€": "euro", "¥": "yen", "₹": "rupee", "°": "degrees", "<": "less than",
    ">": "greater than", "#": "hash", "μ": "micro", ">=": "at least", "<=": "at most", "==": "equals",
    "!=": "is not equal to",
}  # fmt: skip
_STRONGEST_FIRST = "?!.;:,"
_SHOUTED_WORDS = 3


def _any_of(words: Iterable[str]) -> str:
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True))


_OPTIONAL_DOT = rf"({_any_of(_ABBREVIATIONS)})(?![A-Za-z'])(\.?)"
_DOTTED = rf"({_any_of(_DOTTED_ABBREVIATIONS)})(\.)"
_ABBREVIATION = re.compile(rf"(?<![A-Za-z'])(?:{_OPTIONAL_DOT}|{_DOTTED})(?= ?([A-Z])?)")
_BEFORE_NUMBER = re.compile(rf"(?<![A-Za-z'])({_any_of(_BEFORE_NUMBERS)})\. ?(?=\d)")
_INITIALS = re.compile(r"(?<![A-Za-z'.])(?:[A-Za-z]\.)+[A-Za-z](?![A-Za-z'])\.?")
_PER = re.compile(r"/ ?(?=(?:second|minute|hour|hr|day|night|week|month|year|person|user|item|kg|km|mile)\b)")
_SYMBOL = re.compile(_any_of(_SYMBOLS))
_CAPITALS_IN_WORD = re.compile(r"(?<=[a-z])(?=[A-Z]{2})|(?<=[A-Z]{2})(?=[A-Z](?:[a-rt-z]|s[a-z]))")
_CAPITALS = re.compile(r"(?<![A-Za-z])([A-Z]{2,})(s?)(?![A-Za-z])")
_CONSONANTS = re.compile(rf"(?<![A-Za-z'])[bcdfghjklmnpqrstvwxz]{{2,{_SPELLED_LETTERS}}}(?![A-Za-z'])")
_MINUS = r"[$£€¥₹]?\.?\d"  # characters that may follow a minus sign
_TIDY = (
    (re.compile(r"(?<![A-Za-z])'|'(?![A-Za-z])"), " "),
    (re.compile(rf"(?<=\d) - (?={_MINUS})"), " to "),
    (re.compile(r"-{2,}|(?<=\s)-(?=\s)"), ", "),
    (re.compile(rf"-(?![A-Za-z]|{_MINUS})|(?<![A-Za-z\d])-(?=[A-Za-z])"), " "),
    (re.compile(r"\s+"), " "),
    (re.compile(r"(?: ?[.,?!;:])+(?!\d)"), lambda run: min(run[0].replace(" ", ""), key=_STRONGEST_FIRST.index)),
    (re.compile(r"^(?:[.,?!;:] ?)+(?!\d)"), ""),
)


def spoken_english(text: str) -> str:
    """The text as a reader says it: letters, inner apostrophes and hyphens, `. , ? ! ; :` and single spaces, and
    nothing else.

    Numbers, dates, money, units, abbreviations, acronyms and addresses become words; markdown, emoji and other scripts
    go. The result ends like a sentence, or is empty where there is nothing to say. Spoken text stays as it is.
    Never raises; takes time in proportion to the text.
    """
    text = _tidy(plain_line(text))
    if _shouted(text):
        text = text.lower()
    text = _CAPITALS_IN_WORD.sub(" ", text)
    text = speak_numbers(_speak_signs(_expand_abbreviations(text)))
    text = _spell(_SYMBOL.sub(lambda symbol: f" {_SYMBOLS[symbol[0]]} ", text))
    text = _tidy(re.sub(r"[^A-Za-z' .,?!;:-]+", " ", text))
    return spoken_english(text.lower()) if _shouted(text) else text


def _tidy(text: str) -> str:
    """Lone marks dropped, runs of punctuation reduced to the strongest, a full stop after text that ends without."""
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    text = text.strip()
    return text if not text or text[-1] in ".?!" else text.rstrip(",;: ") + "."


def _shouted(text: str) -> bool:
    """Whether all letters are capitals, so that capitals say nothing about the words."""
    return not re.search(r"[a-z]", text) and len(_CAPITALS.findall(text)) >= _SHOUTED_WORDS


def _expand_abbreviations(text: str) -> str:
    """Afterwards no word contains a full stop, and one that ends a sentence is followed by a space."""
    text = _BEFORE_NUMBER.sub(lambda match: f" {_BEFORE_NUMBERS[match[1]]} ", text)
    text = re.sub(r"(?<![A-Za-z'])St(?![A-Za-z'])\.? ?(?=[A-Z])", " Saint ", text)
    text = _ABBREVIATION.sub(_expand, text)
    text = _INITIALS.sub(lambda match: f" {' '.join(match[0].replace('.', '').upper())} ", text)
    text = re.sub(r"(?<=[A-Za-z\d])\.(?=[a-z])", " dot ", text)
    return re.sub(r"(?<=[.,?!;:])(?=[A-Za-z])", " ", text)


def _expand(match: re.Match[str]) -> str:
    short, ends = match[1] or match[3], bool(match[2] or match[4]) and match[5] is not None
    words = _ABBREVIATIONS.get(short) or _DOTTED_ABBREVIATIONS[short]
    return f" {words}{'.' if ends and short in _MAY_END_A_SENTENCE else ''} "


def _speak_signs(text: str) -> str:
    """Signs that mean something else before a number or a word than alone."""
    text = re.sub(r"\b([CF])#", r"\1 sharp ", text)
    text = re.sub(r"#(?=\d)", " number ", text)
    return _PER.sub(" per ", re.sub(r"#(?=[A-Za-z])", " hashtag ", text))


def _spell(text: str) -> str:
    text = _CAPITALS.sub(_spell_capitals, text)
    return _CONSONANTS.sub(lambda match: match[0] if match[0] in _INTERJECTIONS else " ".join(match[0].upper()), text)


def _spell_capitals(match: re.Match[str]) -> str:
    word, ending = match.groups()
    if word in _IN_CAPITALS:
        return _IN_CAPITALS[word]
    if word in _READ_AS_WORDS or (len(word) > _SPELLED_LETTERS and re.search("[AEIOUY]", word)):
        return match[0]
    return " ".join(word) + ("'s" if ending else "")
