"""Convert text with SSML, or markup that language models write, to tokens of spoken and left-out text.

`auto` leaves out Markdown marks, tags, code blocks and emoji, and treats the rest as prose. `ssml` interprets only SSML
elements. `none` speaks everything as written. A `<break>` becomes a pause, and `<sub>` and `<say-as>` replace the
spoken text. Models cannot read phonetic symbols, so `auto` speaks the text inside a `<phoneme>`.
"""

import html
import re
from dataclasses import dataclass
from typing import Literal

from serve_app.extensions.text.ssml import FASTEST, MAX_PAUSE_S, SLOWEST, SPELLED, attributes, pause_s, rate
from serve_app.extensions.text.style_tags import (
    CUE,
    LONGEST_TAG,
    NOT_CLOSED,
    StyleRules,
    Styling,
    begins,
    broken,
    is_vendors,
)

Markup = Literal["auto", "none", "ssml"]
MAX_PAUSES_S = 120.0  # total per text; any further pauses are ignored
_LONGEST_MARK = 400  # maximum length of markup; longer unclosed tags are plain text

_ATTRIBUTE = r"""\s+[A-Za-z_:][\w:.-]*\s*=\s*(?:"[^"<]*"|'[^'<]*'|[^\s"'<>=]+)"""
_TAG = re.compile(rf"<(/?)([A-Za-z][\w:.-]*)((?:{_ATTRIBUTE})*)\s*(/?)>")
_BEGUN_TAG = re.compile(r"""<(?:[/!?]?[A-Za-z\[-](?>=\s*(?:"[^"<]*(?:"|\Z)|'[^'<]*(?:'|\Z))|[^<>])*+|[/!?]?)\Z""")
_COMMENT = re.compile(r"<!--.*?-->|<\?[^<>]*\?>|<![A-Za-z][^<>]*>", re.S)
_BEGUN_COMMENT = re.compile(r"<!(?:-(?:-.*)?)?\Z|<!--.*\Z", re.S)
_AUTOLINK = re.compile(r"<((?:https?://|mailto:)[^\s<>]+|[A-Za-z][\w.+-]*@[\w.-]+)>")
_LINK = re.compile(r"(!?\[)[^\[\]]*(\](?:\([^()]*\)|\[[^\[\]]*\]))")
_LINK_END = re.compile(r"\](?:\([^()]*\)|\[[^\[\]]*\])")
_BEGUN_LINK = re.compile(r"!?\[[^\[\]]*(?:\](?:\([^()]*|\[[^\[\]]*)?)?\Z|!\Z")
_NOTE = re.compile(r"\[\^[^\[\]]*\]:?")
_CUE = re.compile(
    r"\[(?:(?:soft|short|long|light|nervous|heav|deep|quiet|big)\w*\s+)?(?:laugh|chuckl|giggl|sigh|gasp|cough|"
    r"breath|inhale|exhale|clears throat|sob|groan|yawn|pause)\w*(?:\s+\w+)?\]",
    re.I,
)
_CUE_PAUSE = re.compile(
    r"\[pause(?:(?:\s+(?:for\s+)?|\s*:\s*)(\d*\.?\d+)\s*(ms|milliseconds?|s|sec|seconds?)?)?\]", re.I
)
_BEGUN_BRACKET = re.compile(r"\[[^\[\]]*\Z")
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]\w{1,30});")
_BEGUN_ENTITY = re.compile(r"&#?\w{0,31}\Z")
_EMPHASIS = re.compile(r"\*+|_+|~~+|`+")
_FENCE = re.compile(r"[ \t]*(?:(`)``+[^\n`]*|(~)~~+[^\n]*)(?:\n|\Z)")
_FENCE_END = re.compile(r"[ \t]*(?:(`)``+|(~)~~+)[ \t\r]*(?:\n|\Z)")
_BEGUN_FENCE_END = re.compile(r"[ \t]*[`~]*[ \t\r]*\Z")
_RULE = re.compile(
    r"[ \t]*(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,}|=+[ \t]*|\|?[ \t:|-]*-[ \t:|-]*\|[ \t:|-]*)(?:\n|\Z)"
)
_LINE_MARK = re.compile(r"[ \t]*(?:>(?![\d=])[ \t]?)*[ \t]*(?:#{1,6}[ \t]+|[-*+•][ \t]+(?:\[[ xX]\][ \t]+)?)?")
_BEGUN_LINE = re.compile(r"[ \t\r>#*+•=_~`|:-]*(?:\[[ xX]?\]?[ \t]*|\d{1,3}[.)]?)?\Z")
_BEGUN_FENCE = re.compile(r"[ \t]*(?:```|~~~)[^\n]*\Z")
_NUMBERED = re.compile(r"[ \t]*\d{1,3}[.)][ \t]")
_EMPTY = re.compile(r"[ \t\r]*\n")
_SIGNS = "\u231a\u231b\u23e9-\u23fa\u2600-\u27bf\u2b50\u2b55\ufe0f\u20e3"
_EMOJI_CHARS = _SIGNS + "\U0001f000-\U0001faff\U000e0020-\U000e007f"
_EMOJI = re.compile(rf"[{_EMOJI_CHARS}](?:\u200d?[{_EMOJI_CHARS}])*")
_PROSE = {
    "auto": re.compile(rf"[^\n<\[\]!&*_~`|{_EMOJI_CHARS}]+"),
    "ssml": re.compile(r"[^<\[&]+"),
    "none": re.compile(r"[^\n<\[]+"),
}
_PARAGRAPHS = frozenset(["p", "paragraph"])
_THOUGHTS = frozenset(["think", "thinking", "thought", "reasoning"])
_SENTENCES = frozenset(["s", "br", "h1", "h2", "h3", "h4", "h5", "h6", "li", "tr", "div", "speak", "sentence", "title"])
_BLOCKS = _PARAGRAPHS | _THOUGHTS | _SENTENCES
_UNHEARD = frozenset(["desc", "script", "style", "metadata"])  # left out, along with their content
_OBEYED = frozenset(["speak", "break", "sub", "say-as", "spell", "p", "s", "prosody", "paragraph", "sentence", "sup"])
_HYPHENS = ("-", "\u2010")  # a word may continue on the next line
# Short lines that end like sentences: capitalised lines before another such line, and single words.
_SHORT_LINES = re.compile(r"[A-Z0-9][^\n]{0,29}[^\W_]\n[A-Z0-9]|[a-z]{2,15}\n[a-z]")
_ENDS = ".,;:!?…。！？、，；："  # noqa: RUF001
_NO_WORDS = _ENDS + " \t\r\n"
_LINE_END = re.compile(r"[^\S\n]*(?:\n|\Z)")
_BEGUN_POWER = re.compile(r"<sup>(?:[+\u2212-]|&#?\w{0,5};?)?", re.I)
_POWER = re.compile(r"(?:[+\u2212-]|&(?:minus|#8722|#x2212);)?\d", re.I)
_CLOSES = tuple(".,;:!?…)")

MARKS, LINK, CODE, EMOJI = "marks of Markdown", "link target", "code block", "emoji"
THOUGHT = "reasoning of a language model"
TOO_LONG = f"pause beyond {MAX_PAUSE_S:g} s, or {MAX_PAUSES_S:g} s in total"


@dataclass(frozen=True, slots=True)
class Token:
    """A span of the written text, and its spoken form."""

    written: str
    spoken: str = ""
    pause_s: float = 0.0  # silence instead of the text
    speed: float | None = None  # for all text that follows; None leaves the speed unchanged
    style: str | None = None  # for all text that follows; "" selects the request's style
    left_out: str = ""  # what kind of text it is, if it is not spoken
    is_end: bool = False  # whether `spoken` only ends the previous sentence
    is_tag: bool = False  # whether the text is a style tag; spaces around it are dropped before a comma

    @property
    def is_border(self) -> bool:
        """Whether the texts before and after this token belong to different spans."""
        return self.pause_s > 0 or self.speed is not None or self.style is not None


class LiveMarkup:
    """Tokenizer for text that arrives incrementally. Where the text is split does not affect the spoken text."""

    def __init__(self, markup: Markup, *, paragraph_pause_s: float = 0.0, styles: StyleRules | None = None) -> None:
        """Paragraphs are separated by pauses of `paragraph_pause_s` seconds, or like sentences if it is 0."""
        self._markup, self._paragraph_pause_s = markup, paragraph_pause_s
        self._rest = ""
        self._before = ""  # the character before `_rest`
        self._last = self._last_mark = ""  # the last spoken character: any, and not a space
        self._at_line_start = markup != "ssml"
        self._in_table = False
        self._in_link = False
        self._is_marked = self._ends_before = False  # this line; a sentence ends before the next line
        self._has_spoken = self._is_border = False  # a paragraph has ended since the last speech
        self._paused_s = 0.0
        self._fence = ""  # fence of the open code block
        self._thought = ""  # open tag that contains a language model's reasoning
        self._line = ""  # start of the spoken text of this line
        self._spaces: list[Token] = []  # spaces and left-out text that precede the next word
        self._unheard = 0  # number of open tags whose content is not spoken
        self._replaced = self._spelled = ""  # open tag whose content is replaced, or spelled out
        self._alias = ""  # what to speak instead of the text that follows
        self._speeds = [1.0]
        self._style_rules = styles or StyleRules()
        self._styling = Styling(self._style_rules)

    def feed(self, text: str, *, is_last: bool) -> list[Token]:
        """Return the tokens that later text cannot change, or all remaining tokens if `is_last`."""
        self._rest += text
        tokens: list[Token] = []
        at = 0
        while at < len(self._rest):
            longest = LONGEST_TAG if begins(self._rest, at) else _LONGEST_MARK
            final = is_last or len(self._rest) - at > longest
            token = self._next(self._rest[at : at + longest], final=final)
            if token is None:
                break
            at += len(token.written)
            self._before = token.written[-1:] or self._before
            self._last = token.spoken[-1:] or self._last
            self._line = (self._line + token.spoken)[:40] if not token.is_end else self._line
            self._last_mark = token.spoken.rstrip()[-1:] or self._last_mark
            self._give(token, tokens)
        self._rest = self._rest[at:]
        if is_last:
            self._styling.finish()
            tokens += self._spaces
            self._spaces = []
        if self._styling.reports:
            tokens += [Token("", left_out=what) for what in self._styling.reports]
            self._styling.reports.clear()
        return tokens

    def _give(self, token: Token, tokens: list[Token]) -> None:
        """Append a token to `tokens`, but hold spaces back until the next word, and punctuation after a paragraph.

        The delay makes it possible to drop the space between a left-out emoji and a comma.
        """
        is_border = token.is_border
        is_blank = not token.spoken.strip()
        is_said = not is_blank and bool(token.spoken.strip(_NO_WORDS))
        if self._styling.waits and not is_blank:
            end = token.spoken[: len(token.spoken) - len(token.spoken.lstrip(_NO_WORDS))]
            if end and is_said and self._styling.has_said and token.written == token.spoken:
                self._give(Token(end, end), tokens)  # the punctuation ends the previous text
                token = Token(token.written[len(end) :], token.spoken[len(end) :])
            if (is_said or not self._styling.has_said) and (style := self._styling.enter()) is not None:
                tokens.append(Token("", style=style))
        self._styling.has_said = not is_border and (is_said or self._styling.has_said)
        if not is_border and (is_blank or (self._is_border and not is_said and not token.is_end)):
            (self._spaces if token.spoken or self._spaces else tokens).append(token)
            return
        if token.spoken.startswith(_CLOSES) and (
            token.is_end or any(gap.left_out or gap.is_tag for gap in self._spaces)
        ):
            self._spaces = [
                gap if gap.spoken.strip() else Token(gap.written, left_out=gap.left_out) for gap in self._spaces
            ]
        if self._is_border and is_said:
            tokens.append(Token("", pause_s=self._paragraph_pause_s))
        self._is_border = self._is_border and not is_said and not token.pause_s
        self._has_spoken = self._has_spoken or is_said
        tokens += [*self._spaces, token]
        self._spaces = []

    def _next(self, rest: str, *, final: bool) -> Token | None:
        """Return the next token, or None if more text is needed."""
        if self._markup == "none":
            is_tag = rest[0] == "[" or (rest[0] == "<" and is_vendors(rest))
            tag = self._style_tag(rest, final=final) if is_tag else False
            return self._as_written(rest, final=final) if tag is False else tag
        if self._fence:
            return self._code(rest, final=final)
        if self._thought:
            return self._reasoning(rest, final=final)
        if self._at_line_start:
            return self._line_start(rest, final=final)
        match rest[0]:
            case "<":
                return self._tag(rest, final=final)
            case "&":
                return self._entity(rest, final=final)
            case "[":
                return self._bracket(rest, final=final)
        if self._markup == "auto" and (token := self._mark(rest, final=final)) is not False:
            return token
        prose = _PROSE[self._markup].match(rest)
        is_single = self._spelled and self._styling.waits
        written = _run(prose[0] if prose and not is_single else rest[0])
        return self._prose(written, written)

    def _mark(self, rest: str, *, final: bool) -> Token | Literal[False] | None:
        """Return the token for a Markdown mark or an emoji, or False for other text."""
        if line_end := _LINE_END.match(rest):
            if not line_end[0].endswith("\n"):
                return Token(line_end[0], self._heard(line_end[0])) if final else None
            self._at_line_start, self._ends_before = True, self._is_marked
            return Token(line_end[0])
        match rest[0]:
            case "!":
                return self._bracket(rest, final=final) if rest[1:2] in ("[", "") else False
            case "]" if self._in_link and (end := _LINK_END.match(rest)):
                self._in_link = False
                return Token(end[0], left_out=LINK)
            case "*" | "_" | "~" | "`":
                return self._emphasis(rest, final=final)
            case "|" if self._in_table:
                return Token("|", self._heard(", " if self._last.isalnum() else " "))
        emoji = _EMOJI.match(rest)
        return Token(emoji[0], left_out=EMOJI) if emoji else False

    def _as_written(self, rest: str, *, final: bool) -> Token | None:
        if self._at_line_start:
            if empty := _EMPTY.match(rest):
                self._end_paragraph()
                return Token(empty[0], empty[0])
            if not final and not rest.strip(" \t\r"):
                return None
            self._at_line_start = False
        self._at_line_start = rest[0] == "\n"
        prose = _PROSE["none"].match(rest)
        written = _run(prose[0] if prose else rest[0])
        return Token(written, written)

    def _code(self, rest: str, *, final: bool) -> Token | None:
        end = _FENCE_END.match(rest) if self._at_line_start else None
        if end and (final or end[0].endswith("\n")) and self._fence in (end[1], end[2]):
            self._fence, self._ends_before = "", True
            return Token(end[0])
        if self._at_line_start and not final and _BEGUN_FENCE_END.match(rest):
            return None
        line, newline, _ = rest.partition("\n")
        self._at_line_start = bool(newline)
        return Token(line + newline)

    def _reasoning(self, rest: str, *, final: bool) -> Token | None:
        before, mark, _ = rest.partition("<")
        end = re.match(rf"</(?:\w+:)?{self._thought}\s*>", rest, re.I)
        if end:
            self._thought = ""
        elif not before and not final and _BEGUN_TAG.match(rest):
            return None
        return Token(end[0] if end else before or mark)

    def _line_start(self, rest: str, *, final: bool) -> Token | None:
        """Return the token for the marks at the start of a line, such as list, heading, quotation, table or code marks.

        Text before a marked line ends like a sentence.
        """
        fence = _FENCE.match(rest)
        gone = _EMPTY.match(rest) or fence or _RULE.match(rest)
        if gone and (final or gone[0].endswith("\n")):
            self._ends_before = True
            if not gone[0].strip():
                self._end_paragraph()
                return Token(gone[0])
            if gone is fence:
                self._fence = fence[1] or fence[2]
            return Token(gone[0], left_out=CODE if gone is fence else MARKS)
        if not final and (_BEGUN_LINE.match(rest) or _BEGUN_FENCE.match(rest)):
            return None
        mark = _LINE_MARK.match(rest)
        end = mark.end() if mark else 0
        self._in_table = rest[end : end + 1] == "|"
        end += self._in_table
        self._is_marked = bool(rest[:end].strip()) or bool(_NUMBERED.match(rest))
        is_listed, self._line = _SHORT_LINES.fullmatch(f"{self._line}\n{rest[:1]}") is not None, ""
        between = self._between(ends=self._is_marked or self._ends_before or is_listed)
        self._at_line_start = self._ends_before = False
        return Token(rest[:end], between, left_out=MARKS if rest[:end].strip() else "", is_end=True)

    def _end_paragraph(self) -> None:
        self._is_border = self._is_border or (self._has_spoken and self._paragraph_pause_s > 0)

    def _between(self, *, ends: bool) -> str:
        """Return what separates two lines or blocks: a space, or the end of a sentence."""
        if ends and self._last_mark and self._last_mark not in _ENDS:
            return self._heard(". ")
        return self._heard("\n" if self._last in _HYPHENS else " ") if self._last.strip() else ""

    def _tag(self, rest: str, *, final: bool) -> Token | None:
        if comment := _COMMENT.match(rest):
            return Token(comment[0], left_out="comment")
        if not final and _BEGUN_POWER.fullmatch(rest):
            return None
        if tag := _TAG.match(rest):
            return self._meant(tag)
        if link := _AUTOLINK.match(rest):
            return self._prose(link[0], link[1].removeprefix("mailto:"))
        if not final and (_BEGUN_TAG.match(rest) or _BEGUN_COMMENT.match(rest)):
            return None
        if end := broken(rest, final=final):
            return Token(rest[:end], left_out=NOT_CLOSED, is_tag=True)
        return self._prose("<", "<")

    def _meant(self, tag: re.Match[str]) -> Token:
        closes = bool(tag[1])
        name = tag[2].lower().split(":")[-1]
        is_empty = bool(tag[4])
        values = attributes(tag[3])
        if name == "expr":
            name, values = self._styling.lowered(values, closes=closes, is_empty=is_empty)
        is_style = self._styling.element(name, values, closes=closes, is_empty=is_empty)
        left_out = "" if is_style or name in _OBEYED else f"tag {name[:20]}"
        spoken, speed = self._between(ends=True) if name in _BLOCKS else "", None
        if name in _THOUGHTS and not closes and not is_empty and self._markup == "auto":
            self._thought = name
            return Token(tag[0], self._between(ends=True), left_out=THOUGHT, is_end=True)
        if name in _PARAGRAPHS:
            self._end_paragraph()
        if name == "break" and not closes:
            return self._pause(tag[0], pause_s(values))
        if closes:
            self._unheard -= name in _UNHEARD and self._unheard > 0
            if name == self._replaced:
                spoken, self._alias, self._replaced = self._alias, "", ""
            self._spelled = "" if name == self._spelled else self._spelled
            if name == "prosody" and len(self._speeds) > 1:
                before = self._speeds.pop()
                speed = self._speeds[-1] if self._speeds[-1] != before else None
        elif name == "sub" and "alias" in values and not self._replaced:
            alias = self._prose("", values["alias"]).spoken
            spoken, self._alias = (alias, "") if is_empty else ("", alias)
            self._replaced = "" if is_empty else name
        elif name == "speed" and (factor := rate({"rate": values.get("ratio", "")})) != self._speeds[0]:  # Cartesia's
            speed = self._speeds[0] = min(FASTEST, max(SLOWEST, factor))
            left_out = ""
        elif name == "sup" and self._before.isalnum() and _POWER.match(tag.string, tag.end()):
            spoken = self._heard("^")
        elif not is_empty:
            self._unheard += name in _UNHEARD
            if name == "spell" or (name == "say-as" and values.get("interpret-as") in SPELLED):
                self._spelled = name
            if name == "prosody":
                speed = self._faster(rate(values))
        return Token(tag[0], spoken, speed=speed, left_out=left_out, is_end=name in _BLOCKS, is_tag=is_style)

    def _faster(self, factor: float) -> float | None:
        before = self._speeds[-1]
        self._speeds.append(min(FASTEST, max(SLOWEST, before * factor)))
        return self._speeds[-1] if self._speeds[-1] != before else None

    def _pause(self, written: str, seconds: float) -> Token:
        allowed_s = max(0.0, min(seconds, MAX_PAUSE_S, MAX_PAUSES_S - self._paused_s))
        self._paused_s += allowed_s
        return Token(written, pause_s=allowed_s, left_out=TOO_LONG if allowed_s < seconds else "")

    def _bracket(self, rest: str, *, final: bool) -> Token | None:
        if pause := _CUE_PAUSE.match(rest):
            in_ms = bool(pause[2]) and pause[2].lower().startswith("m")
            return self._pause(pause[0], float(pause[1] or 0.5) / (1000 if in_ms else 1))
        if self._markup == "auto" and (gone := _CUE.match(rest) or _NOTE.match(rest)):
            return Token(gone[0], left_out=CUE if gone[0][1] != "^" else "footnote")
        if rest[0] == "[" and (tag := self._style_tag(rest, final=final)) is not False:
            return tag
        if self._markup == "ssml":
            return self._prose("[", "[")
        if not final and _BEGUN_LINK.match(rest):
            return None
        if link := _LINK.match(rest):
            self._in_link = True
            return Token(link[1])
        return self._prose(rest[0], rest[0])

    def _style_tag(self, rest: str, *, final: bool) -> Token | Literal[False] | None:
        """Return the token for a style tag, or False for other text."""
        if rest[0] == "<":
            return self._tag(rest, final=final)
        if tag := self._style_rules.bracket(rest, final=final):
            self._styling.bracket(tag[2], closes=bool(tag[1]))
            return Token(tag[0], is_tag=True)
        if final and (end := self._style_rules.cut_off(rest)):
            return Token(rest[:end], left_out=NOT_CLOSED, is_tag=True)
        return None if not final and (tag is None or _BEGUN_BRACKET.match(rest)) else False

    def _entity(self, rest: str, *, final: bool) -> Token | None:
        if entity := _ENTITY.match(rest):
            return self._prose(entity[0], html.unescape(entity[0]))
        return None if not final and _BEGUN_ENTITY.match(rest) else self._prose("&", "&")

    def _emphasis(self, rest: str, *, final: bool) -> Token | None:
        """Leave out emphasis marks, but keep an asterisk between numbers or spaces, and an underscore in a name."""
        run = _EMPHASIS.match(rest)
        if run is None:
            return None if not final and len(rest) == 1 else self._prose(rest[0], rest[0])
        if not final and run.end() == len(rest):
            return None
        behind = rest[run.end() : run.end() + 1]
        if run[0] == "`" and self._before.isalpha() and behind in tuple("ltsrvdm"):
            return self._prose("`", "'")
        is_sign = {
            "*": (self._before.isdigit() and behind.isdigit()) or (self._before == " " == behind),
            "_": self._before.isalnum() and behind.isalnum(),
        }.get(rest[0], False)
        return self._prose(run[0], run[0]) if is_sign else Token(run[0], left_out=MARKS)

    def _prose(self, written: str, spoken: str) -> Token:
        if self._replaced and self._alias and written.strip():
            spoken, self._alias = self._alias, ""
            return Token(written, "" if self._unheard else spoken)
        if self._spelled:
            spoken = "".join(f"{char} " for char in spoken if not char.isspace())
        return Token(written, self._heard(spoken))

    def _heard(self, text: str) -> str:
        return "" if self._unheard or self._replaced else text


def _run(text: str) -> str:
    """Return the leading whitespace of a text, or the text without trailing whitespace if it starts with a word."""
    return text[: len(text) - len(text.lstrip())] or text.rstrip()
