"""Text with the markup that language models write, as it is to be spoken: no tag, no mark of Markdown is ever read out.

Prose and pauses are left. SSML's breaks are pauses of the stated length, its substitutes and spelled words are mapped;
no loaded model reads phonetic letters, so a `<phoneme>` is spoken as the word that it stands around.
"""

import html
import re
from dataclasses import dataclass

MAX_PAUSE_S = 10.0
_STRENGTHS_S = {"none": 0.0, "x-weak": 0.1, "weak": 0.2, "medium": 0.4, "strong": 0.8, "x-strong": 1.2}
_LONGEST_MARK = 400  # a tag that is not closed by then is no markup

_ATTRIBUTE = r"""\s+[A-Za-z_:][\w:.-]*\s*=\s*(?:"[^"<]*"|'[^'<]*'|[^\s"'<>=]+)"""
_TAG = re.compile(rf"<(/?)([A-Za-z][\w:.-]*)((?:{_ATTRIBUTE})*)\s*(/?)>")
_BEGUN_TAG = re.compile(r"<(?:[/!?]?[A-Za-z\[-][^<>]*|[/!?]?)\Z")
_COMMENT = re.compile(r"<!--.*?-->|<\?[^<>]*\?>|<![A-Za-z][^<>]*>", re.S)
_BEGUN_COMMENT = re.compile(r"<!(?:-(?:-.*)?)?\Z|<!--.*\Z", re.S)
_AUTOLINK = re.compile(r"<((?:https?://|mailto:)[^\s<>]+|[A-Za-z][\w.+-]*@[\w.-]+)>")
_NAMED = re.compile(r"""([A-Za-z_:][\w:.-]*)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'<>=]+))""")
_SECONDS = re.compile(r"\s*([+-]?\d*\.?\d+)\s*(ms|s)\s*", re.I)
_LINK = re.compile(r"!?\[([^\[\]]*)\](?:\([^()]*\)|\[[^\[\]]*\])")
_BEGUN_LINK = re.compile(r"!?\[[^\[\]]*(?:\](?:\([^()]*|\[[^\[\]]*)?)?\Z|!\Z")
_NOTE = re.compile(r"\[\^[^\[\]]*\]:?")
_CUE = re.compile(
    r"\[(?:(?:soft|short|long|light|nervous|heav|deep|quiet|big)\w*\s+)?(?:laugh|chuckl|giggl|sigh|whisper|gasp|cough|"
    r"breath|inhale|exhale|clears throat|crying|sob|groan|yawn|excited|sad|angr|happ|sarcastic|curious|shout|pause)\w*"
    r"(?:\s+\w+)?\]",
    re.I,
)
_CUE_PAUSE = re.compile(r"\[pause(?:\s+(?:for\s+)?(\d*\.?\d+)\s*(ms|milliseconds?|s|sec|seconds?))?\]", re.I)
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]\w{1,30});")
_BEGUN_ENTITY = re.compile(r"&#?\w{0,31}\Z")
_EMPHASIS = re.compile(r"\*+|_+|~~+|`+")
_FENCE = re.compile(r"[ \t]*(?:```|~~~)[^\n]*(?:\n|\Z)")
_RULE = re.compile(
    r"[ \t]*(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,}|=+[ \t]*|\|?[ \t:|-]*-[ \t:|-]*\|[ \t:|-]*)(?:\n|\Z)"
)
_LINE_MARK = re.compile(r"[ \t]*(?:>[ \t]?)*[ \t]*(?:#{1,6}[ \t]+|[-*+•][ \t]+(?:\[[ xX]\][ \t]+)?)?")
_BEGUN_LINE = re.compile(r"[ \t>#*+•=_~`|:-]*(?:\[[ xX]?\]?[ \t]*|\d{1,3}[.)]?)?\Z")
_BEGUN_FENCE = re.compile(r"[ \t]*(?:```|~~~)[^\n]*\Z")
_PLAIN = re.compile(r"[^\n<\[!&*_~`|]+")
_NUMBERED = re.compile(r"[ \t]*\d{1,3}[.)][ \t]")
_EMPTY = re.compile(r"[ \t]*\n")
_BLOCKS = frozenset(
    ["p", "s", "br", "h1", "h2", "h3", "h4", "h5", "h6", "li", "tr", "div", "speak", "paragraph", "sentence", "title"]
)
_UNHEARD = frozenset(["desc", "script", "style", "metadata"])  # with all that is in them
_SPELLED = ("characters", "spell-out", "verbatim", "digits")
_ENDS = ".,;:!?…。！？、，；："  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class Pause:
    """Silence of a stated length."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Said:
    """Text as it was written, and its spoken form: prose, a pause, or nothing."""

    written: str
    spoken: str | Pause


def speakable(text: str) -> list[str | Pause]:
    """Prose and pauses, in their order; prose neither begins nor ends with whitespace."""
    parts: list[str | Pause] = [""]
    for said in LiveSpeakable().feed(text, is_last=True):
        if isinstance(said.spoken, Pause):
            parts += [said.spoken, ""]
        else:
            last = parts[-1]
            assert isinstance(last, str)
            parts[-1] = last + said.spoken
    return [part for part in (each if isinstance(each, Pause) else each.strip() for each in parts) if part]


class LiveSpeakable:
    """`speakable` of a text that comes in parts: wherever it is cut, the same comes out."""

    def __init__(self) -> None:
        self._rest = ""
        self._before = ""  # character that was written before `_rest`
        self._last = ""  # character that was given last
        self._at_line_start, self._in_table = True, False
        self._is_marked = self._ends_before = False  # this line; whether a sentence ends before the next one
        self._unheard = 0  # tags around this place whose text is not spoken
        self._replaced = self._spelled = ""  # the tag whose content is not heard, or letter by letter

    def feed(self, text: str, *, is_last: bool) -> list[Said]:
        """The tokens that are certain with `text`; with the last part the rest."""
        self._rest += text
        said = []
        while self._rest:
            final = is_last or len(self._rest) > _LONGEST_MARK
            taken = self._next(self._rest[:_LONGEST_MARK], final=final)
            if taken is None:
                break
            end, spoken = taken
            written, self._rest = self._rest[:end], self._rest[end:]
            self._before = written[-1:] or self._before
            if isinstance(spoken, str):
                self._last = spoken[-1:] or self._last
            said.append(Said(written, spoken))
        return said

    def _next(self, rest: str, *, final: bool) -> tuple[int, str | Pause] | None:
        """The end of the next token and its spoken form; None where more text has to come first."""
        if self._at_line_start:
            return self._line_start(rest, final=final)
        match rest[0]:
            case "\n":
                self._at_line_start, self._ends_before = True, self._is_marked
                return 1, ""
            case "<":
                return self._tag(rest, final=final)
            case "[" | "!":
                return self._bracket(rest, final=final)
            case "&":
                return self._entity(rest, final=final)
            case "*" | "_" | "~" | "`":
                return self._emphasis(rest, final=final)
            case "|" if self._in_table:
                return 1, self._heard(", " if self._last.isalnum() else " ")
        match = _PLAIN.match(rest)
        end = match.end() if match else 1
        return end, self._prose(rest[:end])

    def _line_start(self, rest: str, *, final: bool) -> tuple[int, str] | None:
        """Marks of lists, headings, quotations, tables, code; the text before ends like a sentence."""
        gone = _EMPTY.match(rest) or _FENCE.match(rest) or _RULE.match(rest)
        if gone and (final or gone[0].endswith("\n")):
            self._ends_before = True
            return gone.end(), ""
        if not final and (_BEGUN_LINE.match(rest) or _BEGUN_FENCE.match(rest)):
            return None
        mark = _LINE_MARK.match(rest)
        end = mark.end() if mark else 0
        self._in_table = rest[end : end + 1] == "|"
        end += self._in_table
        self._is_marked = bool(rest[:end].strip()) or bool(_NUMBERED.match(rest))
        between = self._between(ends=self._is_marked or self._ends_before)
        self._at_line_start = self._ends_before = False
        return end, between

    def _between(self, *, ends: bool) -> str:
        """The separator of two lines or blocks: a space, or the end of a sentence."""
        if not self._last.strip():
            return ""
        return self._heard(". " if ends and self._last not in _ENDS else " ")

    def _tag(self, rest: str, *, final: bool) -> tuple[int, str | Pause] | None:
        if comment := _COMMENT.match(rest):
            return comment.end(), ""
        if tag := _TAG.match(rest):
            return tag.end(), self._meant(tag)
        if link := _AUTOLINK.match(rest):
            return link.end(), self._prose(link[1].removeprefix("mailto:"))
        if not final and (_BEGUN_TAG.match(rest) or _BEGUN_COMMENT.match(rest)):
            return None
        return 1, self._prose("<")

    def _meant(self, tag: re.Match[str]) -> str | Pause:
        closes, name, is_empty = bool(tag[1]), tag[2].lower().split(":")[-1], bool(tag[4])
        fields = {key.lower(): html.unescape(a or b or c) for key, a, b, c in _NAMED.findall(tag[3])}
        between = self._between(ends=True) if name in _BLOCKS else ""
        if closes:
            self._unheard -= name in _UNHEARD and self._unheard > 0
            self._replaced = "" if name == self._replaced else self._replaced
            self._spelled = "" if name == self._spelled else self._spelled
        elif name == "break":
            return Pause(_pause_s(fields))
        elif name == "sub" and "alias" in fields:
            alias = self._prose(fields["alias"])
            self._replaced = self._replaced or ("" if is_empty else name)
            return alias
        elif not is_empty:
            self._unheard += name in _UNHEARD
            if name == "say-as" and fields.get("interpret-as") in _SPELLED:
                self._spelled = name
        return between

    def _bracket(self, rest: str, *, final: bool) -> tuple[int, str | Pause] | None:
        if pause := _CUE_PAUSE.match(rest):
            in_ms = bool(pause[2]) and pause[2].lower().startswith("m")
            return pause.end(), Pause(min(MAX_PAUSE_S, float(pause[1] or 0.5) / (1000 if in_ms else 1)))
        if gone := _CUE.match(rest) or _NOTE.match(rest):
            return gone.end(), ""
        if not final and _BEGUN_LINK.match(rest):
            return None
        if link := _LINK.match(rest):
            return link.end(), self._prose(_EMPHASIS.sub("", link[1]))
        return 1, self._prose(rest[0])

    def _entity(self, rest: str, *, final: bool) -> tuple[int, str] | None:
        if entity := _ENTITY.match(rest):
            return entity.end(), self._prose(html.unescape(entity[0]))
        return None if not final and _BEGUN_ENTITY.match(rest) else (1, self._prose("&"))

    def _emphasis(self, rest: str, *, final: bool) -> tuple[int, str] | None:
        """Marks around words go; a star between numbers or spaces, and a line within a name, stay."""
        run = _EMPHASIS.match(rest)
        if run is None:
            return None if not final and len(rest) == 1 else (1, self._prose(rest[0]))
        if not final and run.end() == len(rest):
            return None
        behind = rest[run.end() : run.end() + 1]
        is_sign = {
            "*": (self._before.isdigit() and behind.isdigit()) or (self._before == " " == behind),
            "_": self._before.isalnum() and behind.isalnum(),
        }.get(rest[0], False)
        return run.end(), self._prose(run[0]) if is_sign else ""

    def _prose(self, text: str) -> str:
        return self._heard("".join(f"{char} " for char in text if not char.isspace()) if self._spelled else text)

    def _heard(self, text: str) -> str:
        return "" if self._unheard or self._replaced else text


def _pause_s(fields: dict[str, str]) -> float:
    """Of an SSML break."""
    stated = _SECONDS.fullmatch(fields.get("time", ""))
    if stated is None:
        return _STRENGTHS_S.get(fields.get("strength", "medium"), _STRENGTHS_S["medium"])
    seconds = float(stated[1]) / (1000 if stated[2].lower() == "ms" else 1)
    return min(MAX_PAUSE_S, max(0.0, seconds))
