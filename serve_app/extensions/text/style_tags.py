"""Recognize style tags, map their labels to styles, and track the current style of a text.

A *style* is either an instruction for a model that supports instructions, or the name of a stored voice's take.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field

from deployments.protocol import ModelInfo, ModelKind
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.voice_source import ClonedVoice
from serve_app.text.characters import clean

MAX_SPANS = 64  # maximum number of styled spans per text
MAX_LABEL_CHARS = 80
LONGEST_TAG = 4096  # maximum length of a style tag; longer unclosed ones are plain text
CUE = "direction in brackets"
NOT_CLOSED = "style tag that is not closed"
TOO_MANY = f"style tag beyond {MAX_SPANS} spans"
TOO_LONG = f"style label beyond {MAX_LABEL_CHARS} characters"

_NAMES = ("emotion", "expression", "express-as", "effect", "expr", "emphasis", "prosody", "volume")
_LABELLED = ("emotion", "expression", "express-as", "effect", "expr")
_KINDS = ("style", "emphasis", "volume", "pitch")  # kinds of styles that can apply at the same time
_ATTRIBUTE = r"""\s+[A-Za-z_:][\w:.-]*\s*=\s*(?:"[^"<]*"|'[^'<]*'|[^\s"'<>=]+)"""
_BEGUN = re.compile(rf"</?(?:\w+:)?(?:{'|'.join(_NAMES)})(?![\w.-])", re.I)
# The part of an unclosed tag to remove: everything up to an angle bracket, or else the syntax of the tag.
_BROKEN = re.compile(
    rf"</?[\w:-]+(?:[^<>]*>|(?:{_ATTRIBUTE})*(?:\s+[\w:-]*(?:\s*=\s*(?:\"[^\"<>]*|'[^'<>]*)?)?\Z)?\s*/?)"
)
_VENDORS = re.compile(r"</?(?:emotion|expression|expr)(?![\w.-])|</?[a-z]{0,9}\Z", re.I)
_CUT_OFF = re.compile(r"</?([a-z-]{2,})\Z", re.I)
_BRACKET = re.compile(r"\[\s*(/?)\s*([^\[\]\n]+?)\s*\]")
_OPEN_BRACKET = re.compile(r"\[\s*/?\s*([^\[\]\n]+?)\s*")
_BEGUN_TARGET = re.compile(r"\([^()]*\Z|\Z")
_TARGET = re.compile(r"\((?:[^()\s]*[./#:][^()]*)?\)")  # target of a Markdown link
_SAME_STEM = 5  # minimum number of letters in common, as in "cheerful" and "cheerfully"

# Labels that are tags in every text. Other labels are tags only for eleven_v3, eleven_v4, or if they name a take.
_WORD = (
    r"(?:(?:whisper|excited|sad|angr|happ|sarcastic|curious|shout|crying)\w*|"
    r"(?:cheerful|joyful|playful|mischievous|enthusiastic|surprised|amazed|scared|fearful|afraid|terrified|nervous|"
    r"anxious|worried|panicked|frustrated|annoyed|irritated|furious|disgusted|disappointed|sorrowful|melancholic|"
    r"nostalgic|wistful|tired|exhausted|sleepy|sleepi|bored|hesitant|confused|apologetic|sympathetic|affectionate|"
    r"tender|warm|friendly|gentle|gent|calm|serene|soothing|relieved|hopeful|confident|proud|determined|serious|"
    r"stern|dramatic|mysterious|suspicious|deadpan|monotone|ironic|neutral|loud|quiet|soft|hushed|slow|fast|quick|rapid|"
    r"rushed|hurried|sing|yell|scream|plead)(?:ly|ally|er|s|ing)?\b)"
)
_MORE = r"(?:(?:short|long|light|heav|deep|big|very|more|slightly|really|extremely|a (?:bit|little))\w*\s+)?"
_PHRASE = _MORE + _WORD
_KNOWN = re.compile(rf"{_PHRASE}(?:(?:\s*,\s*|\s+and\s+){_PHRASE})*(?:\s+\w+)?", re.I)
_ANY_LABEL = re.compile(r"(?!sic\Z)[^\W\d_][^\[\]\n]+", re.I)
_ANY_BRACKET = re.compile(r"(?:.*/)?eleven_v[34](?:[_-].*)?", re.I)
_PLAIN = re.compile(r"neutral|normal|default|medium|none", re.I)
# Instructions that the embedded voice supports, and synonyms for them.
_MANNERS = {
    "Speak slowly.": re.compile(r"\b(?:slow|leisurely|unhurried)", re.I),
    "Speak faster, please.": re.compile(r"\b(?:fast|quick|rapid|rushed|hurried)", re.I),
    "Use a quiet voice.": re.compile(r"\b(?:quiet|soft|whisper|hushed|gentl)", re.I),
}
_NEGATED = re.compile(r"\b(?:not|no|less|never)\b", re.I)
_VOLUMES = {"silent": "very quiet", "x-soft": "very quiet", "soft": "quiet", "-": "quiet"} | {
    "loud": "loud",
    "+": "loud",
    "x-loud": "very loud",
}
_PITCHES = {"x-low": "very low pitch", "low": "low pitch", "-": "low pitch"} | {
    "high": "high pitch",
    "+": "high pitch",
    "x-high": "very high pitch",
}
_UNCHANGED = re.compile(r"|medium|default|[+-]?0*\.?0*\s*(?:dB|%|st|Hz)?", re.I)
_EMPHASES = {"strong": "strong emphasis", "moderate": "emphasis", "reduced": "reduced emphasis", "none": ""}


def named_take(words: str | None, styles: Sequence[str]) -> str | None:
    """Return the first of `styles` that matches one of the words, such as "whispering" for "whispers"."""
    named = re.findall(r"\w+", (words or "").casefold())
    return next((style for style in styles if any(_is_same(word, style.casefold()) for word in named)), None)


def _is_same(word: str, style: str) -> bool:
    shared = next((n for n, (a, b) in enumerate(zip(word, style, strict=False)) if a != b), min(len(word), len(style)))
    return word == style or shared >= _SAME_STEM


def as_instructions(base: str | None, style: str) -> str:
    """Append a style to the instructions in the request."""
    return f"{base.rstrip(' .')}. {style}" if base else style


@dataclass(frozen=True, slots=True)
class StyleRules:
    """Effect that labels have with one model and voice."""

    follows: Literal["nothing", "manners", "all"] = "nothing"  # instructions that the model supports
    # Styles of the stored voice in use. The limits exist because jobs store these rules.
    takes: Annotated[tuple[Annotated[str, Field(max_length=MAX_LABEL_CHARS)], ...], Field(max_length=MAX_SPANS)] = ()
    any_bracket: bool = False  # whether words in brackets are always a tag

    @classmethod
    def of(cls, body: SpeechBody, info: ModelInfo, stored: ClonedVoice | None) -> Self:
        follows: Literal["nothing", "manners", "all"] = "nothing"
        if info.supports_instructions:
            follows = "all" if info.spoken_form is None else "manners"
        takes = stored.styles if stored is not None and info.kind is ModelKind.BASE else ()
        return cls(follows, takes, any_bracket=_ANY_BRACKET.fullmatch(str(body.model)) is not None)

    def effect(self, label: str) -> str | None:
        """Return the style for a label, "" for the style of the request, or None if it has no effect."""
        if (take := named_take(label, self.takes)) is not None:
            return take
        if self.follows == "all":
            return label
        asked = [manner for manner, words in _MANNERS.items() if words.search(label)]
        if self.follows == "manners" and asked and not _NEGATED.search(label):
            return " ".join(asked)
        return "" if _PLAIN.fullmatch(label) else None

    def is_label(self, words: str) -> bool:
        """Return whether these words in square brackets are a style tag."""
        if _KNOWN.fullmatch(words) or (self.any_bracket and _ANY_LABEL.fullmatch(words)):
            return True
        return len(words) <= MAX_LABEL_CHARS and named_take(words, self.takes) is not None

    def bracket(self, rest: str, *, final: bool) -> re.Match[str] | Literal[False] | None:
        """Match a tag in square brackets at the start of `rest`, with groups for its slash and its label.

        Return None if more text is needed. Return False for other text, including Markdown links.
        """
        tag = _BRACKET.match(rest)
        if tag is None or not self.is_label(tag[2]):
            return False
        if not final and _BEGUN_TARGET.match(rest, tag.end()):
            return None
        return False if _TARGET.match(rest, tag.end()) else tag

    def cut_off(self, rest: str) -> int:
        """Return the length of a tag that begins at an opening bracket and is cut off at the end of the text, or 0."""
        begun = _OPEN_BRACKET.fullmatch(rest)
        return len(rest) if begun and (_KNOWN.fullmatch(begun[1]) or named_take(begun[1], self.takes)) else 0


def begins(text: str, at: int) -> bool:
    """Return whether a style tag begins at position `at`."""
    return text[at] == "<" and _BEGUN.match(text, at) is not None


def is_vendors(rest: str) -> bool:
    """Return whether the text begins, or might begin, with a vendor's tag that is not part of SSML."""
    return _VENDORS.match(rest) is not None


def broken(rest: str, *, final: bool) -> int:
    """Return the length of an unclosed or cut-off style tag at the start of a text that begins with `<`, or 0."""
    if _BEGUN.match(rest):
        found = _BROKEN.match(rest)
        return found.end() if found else 0
    cut = _CUT_OFF.match(rest) if final else None
    return cut.end() if cut and any(name.startswith(cut[1].lower()) for name in _NAMES) else 0


@dataclass(frozen=True, slots=True)
class _OpenTag:
    element: str  # name of the closing element; "" if the tag applies until the next tag of its kind
    kind: str
    style: str


class Styling:
    """Tracks the current style in a text. A new style starts at the first word after its tag."""

    def __init__(self, rules: StyleRules) -> None:
        self._rules = rules
        self._open: list[_OpenTag] = []
        self._wanted = self._present = ""
        self._num_spans = 0
        self._unheard = ""  # the latest tag's name in reports, until a word follows
        self._elements: list[str] = []  # element that each open `<expr>` stands for
        self.has_said = False  # whether a word has been spoken since the last change of style, speed or pause
        self.reports: list[str] = []  # names of tags without effect

    @property
    def waits(self) -> bool:
        """Whether the caller must call `enter` before the next word."""
        return bool(self._unheard) or self._wanted != self._present

    def enter(self) -> str | None:
        """Start the next word. Return the word's style if it differs from the previous one, or None."""
        self._unheard = ""
        if self._wanted and self._wanted != self._present and self._num_spans >= MAX_SPANS:
            self.reports.append(TOO_MANY)
            self._wanted = ""
        if self._wanted == self._present:
            return None
        self._num_spans += bool(self._wanted)
        self._present, self.has_said = self._wanted, False
        return self._present

    def bracket(self, label: str, *, closes: bool) -> None:
        """Apply a tag in square brackets."""
        if closes:
            self._end("")
        else:
            self._start(CUE, label)

    def element(self, name: str, values: Mapping[str, str], *, closes: bool, is_empty: bool) -> bool:
        """Apply an element, given its lower-case name. Return whether the element is a style tag.

        The caller handles all other elements, and the rate of a `<prosody>`.
        """
        if closes:
            if name not in _NAMES:
                return False
            self._end(name)
            return True
        element = "" if is_empty else name
        match name:
            case "emphasis":
                label = _EMPHASES.get(values.get("level", "moderate"), "emphasis")
                self._start("tag emphasis", "" if is_empty else label, element, kind=name, is_needed=is_empty)
            case "volume":
                loudness = _loudness(values.get("ratio", ""))
                self._start("tag volume", loudness, element, kind=name, is_needed=loudness is None)
            case "prosody":
                self._start_prosody(values, is_empty=is_empty)
            case _ if name in _LABELLED:
                label = next((values[key] for key in ("value", "label", "name", "style", "type") if key in values), "")
                self._start(f"tag {name}", label.strip(" \t\n\u2018\u2019\u201c\u201d"), element, is_needed=True)
            case _:
                return False
        return True

    def lowered(self, values: Mapping[str, str], *, closes: bool, is_empty: bool) -> tuple[str, dict[str, str]]:
        """Return the name and the attributes of the element that LiveKit's `<expr>` stands for."""
        if closes:
            return (self._elements.pop() if self._elements else "expr"), {}
        kind, label = values.get("type", "expression").lower(), values.get("label", values.get("value", "")).strip()
        match kind, label.lower():
            case "break", _:
                name, meant = "break", {"time": label}
            case "spell" | "sound", _:
                name, meant = kind, {}
            case "prosody", "slow" | "fast" | "x-slow" | "x-fast":
                name, meant = ("speed", {"ratio": label.lower()}) if is_empty else ("prosody", {"rate": label.lower()})
            case "prosody", "soft" | "loud":
                ratio = {"soft": "0.5", "loud": "1.5"}[label.lower()]
                name, meant = ("volume", {"ratio": ratio}) if is_empty else ("prosody", {"volume": label.lower()})
            case _:
                name, meant = "expr", {"value": label}
        if not is_empty and len(self._elements) < MAX_SPANS:
            self._elements.append(name)
        return name, meant

    def finish(self) -> None:
        """Report the last tag if the text has ended without another word."""
        self._settle()

    def _start_prosody(self, values: Mapping[str, str], *, is_empty: bool) -> None:
        parts = []
        for part, labels in (("volume", _VOLUMES), ("pitch", _PITCHES)):
            stated = values.get(part, "").strip().lower()
            label = "" if _UNCHANGED.fullmatch(stated) else labels.get(stated) or labels.get(stated[:1])
            style = "" if label == "" else self._rules.effect(label) if label and not is_empty else None
            if style is None:
                self.reports.append(f"prosody {part}")
            parts += [_OpenTag("", part, style or "")] if stated else []
        if not is_empty:  # the volume and pitch end with the element
            self._add(_OpenTag("prosody", "", ""), *parts, what="tag prosody")

    def _start(
        self, what: str, label: str | None, element: str = "", *, kind: str = "style", is_needed: bool = False
    ) -> None:
        """Start the style of a tag. `what` is the tag's name in reports. If `is_needed`, report a missing label."""
        label = clean(label or "")
        style = self._rules.effect(label) if label else None if is_needed else ""
        if len(label) > MAX_LABEL_CHARS:
            style, what = None, TOO_LONG
        if style is None:
            self.reports.append(what)
        self._add(_OpenTag(element, kind, style or ""), what=what)

    def _add(self, *tags: _OpenTag, what: str) -> None:
        """Add tags. Each one replaces the latest tag of its kind that has no closing element."""
        self._settle()
        for tag in tags:
            level = self._level()
            self._open[level:] = [other for other in self._open[level:] if other.kind != tag.kind]
            self._open.append(tag)
        if len(self._open) > 2 * MAX_SPANS:
            del self._open[-len(tags) :]
            self.reports.append(TOO_MANY)
        self._unheard = what if any(tag.style for tag in tags) else ""
        self._update()

    def _end(self, element: str) -> None:
        """End this element's latest open tag, and any nested tags that have no closing element."""
        self._settle()
        at = next((n for n in range(len(self._open) - 1, -1, -1) if element and self._open[n].element == element), None)
        if at is None and element in ("", *_LABELLED):
            level = self._level()
            self._open[level:] = [other for other in self._open[level:] if other.kind != "style"]
        elif at is not None:
            behind = next((n for n in range(at + 1, len(self._open)) if self._open[n].element), len(self._open))
            del self._open[at:behind]
        self._update()

    def _level(self) -> int:
        """Return the index of the first tag inside the innermost open element."""
        return next((n for n in range(len(self._open), 0, -1) if self._open[n - 1].element), 0)

    def _update(self) -> None:
        """Apply the most recent tag of each kind."""
        latest = {tag.kind: tag.style for tag in self._open}
        known = list(dict.fromkeys(style for kind in _KINDS if (style := latest.get(kind))))
        if self._rules.takes:
            self._wanted = known[0] if known else ""
        else:
            self._wanted = (" " if self._rules.follows == "manners" else ", ").join(known)

    def _settle(self) -> None:
        """Report the latest tag as having no effect if no word has followed it."""
        if self._unheard:
            self.reports.append(f"{self._unheard} without text")
        self._unheard = ""


def _loudness(ratio: str) -> str | None:
    """Return the label for a ratio to the normal volume, or None if the ratio is invalid."""
    stated = re.fullmatch(r"\s*(\d*\.?\d+)\s*", ratio)
    return None if stated is None else "quiet" if float(stated[1]) < 1 else "loud" if float(stated[1]) > 1 else ""
