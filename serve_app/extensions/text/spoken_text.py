"""Convert the sent text to the spoken text, in one pipeline for all models and dialects.

`markup.py` splits markup into prose, pauses and changes of speed. The lexicon, optional text normalization, and the
voice's own spoken form then convert the prose in stages. A stage takes text in parts and pairs its input with its
output, so that every spoken word can be traced back to the sent word. To add a stage, add a line to `_prose_stages`.
"""

import re
import unicodedata
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from deployments.embedded_voice.english import spoken_english, unspoken
from deployments.embedded_voice.live_english import LiveEnglish, TextPart
from deployments.protocol import ModelInfo
from serve_app.extensions.text.lexicon import Lexicon, LiveLexicon
from serve_app.extensions.text.markup import LiveMarkup, Markup, Token
from serve_app.extensions.text.normalisation import LiveNormaliser
from serve_app.extensions.text.ssml import SsmlCheck
from serve_app.extensions.text.style_tags import StyleRules
from serve_app.text.characters import clean, is_speakable
from serve_app.text.spoken import LEFT_OUT, UNSPOKEN, SpokenPiece, SpokenText, TextSpan

CHARS_AT_ONCE = 256  # number of characters converted per iteration of the event loop, which takes a few ms
_LONGEST_CLUSTER = 64  # characters to search for a boundary; Unicode's stream-safe format allows 30 marks
_LONGEST_REST = 1024  # most characters to hold back if there is no boundary; ordinary text has far fewer
_WORDS = re.compile(r"\s*\S+|\s+")  # words with their leading whitespace
_GREEK_END = re.compile(r"[Ͱ-Ͽἀ-῿]{0,64}\Z")


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules for converting a text to its spoken form."""

    markup: Markup = "none"
    paragraph_pause_s: float = 0.0  # with 0, a paragraph ends like a sentence
    lexicon: Lexicon = field(default_factory=lambda: Lexicon.EMPTY)
    spoken_form: str | None = None  # from ModelInfo
    max_segment_chars: int | None = None  # None selects the model's limit
    normalised: str | None = None  # language of text normalization; None disables it
    styles: StyleRules = field(default_factory=StyleRules)


class TextStage(Protocol):
    """Converter for text that arrives incrementally. Where the text is split does not affect the result."""

    def feed(self, text: str, *, is_last: bool) -> list[TextPart]:
        """Return the parts that later text cannot change, or all if `is_last`. Joined, their `written` is the input."""
        ...


@dataclass(frozen=True, slots=True)
class ReadText(SpokenText):
    """A complete text and its spoken form under the given rules."""

    rules: TextRules

    @property
    def has_words(self) -> bool:
        """Whether there are words besides tags and directions in brackets."""
        tokens = LiveMarkup(self.rules.markup, styles=self.rules.styles).feed(self.sent, is_last=True)
        return any(is_speakable(token.written) for token in tokens if not token.written.startswith(("<", "[")))

    def pieces(self) -> Iterator[SpokenPiece]:
        """Yield the pieces of the complete text lazily."""
        reader = TextReader(self.rules)
        for start in range(0, len(self.sent), CHARS_AT_ONCE):
            yield from reader.feed(self.sent[start : start + CHARS_AT_ONCE], is_last=False)
        yield from reader.feed("", is_last=True)


def rules_of(spoken: SpokenText, info: ModelInfo) -> TextRules:
    """Return the rules that a text was read with: the model's, if another extension has read it."""
    return spoken.rules if isinstance(spoken, ReadText) else TextRules(spoken_form=info.spoken_form)


def read(sent: str, rules: TextRules, *, field: str = "input") -> ReadText:
    """Convert a complete text at once, with the same result as `TextReader`. Raises InvalidRequest for invalid SSML."""
    left_out: Counter[str] = Counter()
    if rules.markup == "ssml":
        check = SsmlCheck(field)
        check.feed(sent, is_last=True)
        left_out += check.without_effect
    markup = LiveMarkup(rules.markup, paragraph_pause_s=rules.paragraph_pause_s, styles=rules.styles)
    tokens = markup.feed(sent, is_last=True)
    left_out.update(token.left_out for token in tokens if token.left_out)
    if rules.spoken_form == "english" and (lost := unspoken("".join(token.spoken for token in tokens))):
        left_out[UNSPOKEN] = lost
    spans: list[TextSpan] = []
    prose: list[str] = []
    pause_s, speed, style = 0.0, 1.0, ""
    for token in tokens:
        prose.append(token.spoken)
        if not token.is_border:
            continue
        if is_speakable(text := _spoken("".join(prose), rules)):
            spans.append(TextSpan(text, pause_s, speed, style))
            pause_s = 0.0
        prose.clear()
        pause_s += token.pause_s
        speed = speed if token.speed is None else token.speed
        style = style if token.style is None else token.style
    text = _spoken("".join(prose), rules)
    text = text if is_speakable(text) or not spans else ""
    rest = [TextSpan(text, pause_s, speed, style)] if text or pause_s else []
    return ReadText(sent, (*spans, *rest), left_out, rules)


def _prose_stages(rules: TextRules) -> list[TextStage]:
    """Create the stages that convert the prose of a span, up to the voice's own spoken form."""
    stages: list[TextStage] = []
    if rules.lexicon:
        stages.append(LiveLexicon(rules.lexicon))
    if rules.normalised:
        stages.append(LiveNormaliser(rules.normalised))
    return stages


def _spoken(prose: str, rules: TextRules) -> str:
    """Return the result of all stages for a complete span."""
    for stage in _prose_stages(rules):
        prose = "".join(part.spoken for part in stage.feed(prose, is_last=True))
    return spoken_english(prose) if rules.spoken_form == "english" else clean(prose)


class TextReader:
    """Converter for text that arrives incrementally. Where the text is split does not affect the spoken text."""

    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self._markup = LiveMarkup(rules.markup, paragraph_pause_s=rules.paragraph_pause_s, styles=rules.styles)
        self.left_out: Counter[str] = Counter()  # counts as in SpokenText, for the text fed so far
        self._uncounted = ""  # Greek letters at the end of the text fed so far, which are silent within a word
        self._begin()

    @property
    def will_speak(self) -> bool:
        """Whether the waiting text will contain a spoken word, regardless of later text."""
        return self._front.will_speak

    def feed(self, text: str, *, is_last: bool) -> list[SpokenPiece]:
        """Return the pieces that later text cannot change, or all remaining pieces if `is_last`."""
        pieces: list[SpokenPiece] = []
        prose: list[TextPart] = []
        for token in self._markup.feed(text, is_last=is_last):
            self._count(token)
            if token.is_border:
                pieces += self._pass([*prose, TextPart("", token.spoken)] if token.spoken else prose, is_last=True)
                pieces.append(SpokenPiece(token.written, self._space(), token.pause_s, token.speed, token.style))
                prose = []
            else:
                is_heard = (token.spoken and not token.is_end) or token.written.isspace()
                prose.append(TextPart(token.written if is_heard else LEFT_OUT * len(token.written), token.spoken))
        self._count(Token("", " " if is_last else ""))
        return pieces + self._pass(prose, is_last=is_last)

    def _count(self, token: Token) -> None:
        self.left_out.update([token.left_out] if token.left_out else [])
        if self._rules.spoken_form == "english":
            text = self._uncounted + token.spoken
            self._uncounted = _GREEK_END.search(text)[0]  # type: ignore[index]  # also matches ""
            if lost := unspoken(text.removesuffix(self._uncounted)):
                self.left_out[UNSPOKEN] += lost

    def _begin(self) -> None:
        """Reset the stages for a new span."""
        self._front: LiveEnglish | LivePlain = LiveEnglish() if self._rules.spoken_form == "english" else LivePlain()
        self._stages = [(stage, _Trace()) for stage in (*_prose_stages(self._rules), self._front)]
        self._has_spoken = False

    def _space(self) -> str:
        """End a span. Return the space before the next span, or "" if the ended span has no spoken text."""
        had_spoken = self._has_spoken
        self._begin()
        return " " if had_spoken else ""

    def _pass(self, parts: list[TextPart], *, is_last: bool) -> list[SpokenPiece]:
        """Run `parts` (pairs of sent text and prose) through all stages. Return the resulting pieces."""
        for stage, trace in self._stages:
            made = stage.feed("".join(part.spoken for part in parts), is_last=is_last)
            parts = trace.follow(parts, made, is_last=is_last)
        self._has_spoken = self._has_spoken or any(part.spoken.strip() for part in parts)
        return [SpokenPiece(part.written, part.spoken) for part in parts]


class _Trace:
    """Maps a stage's output to the sent text."""

    def __init__(self) -> None:
        self._before: deque[TextPart] = deque()  # sent text, paired with the input of the stage
        self._written: list[str] = []  # sent text of the next part
        self._spoken: list[str] = []  # output of the stage for the next part
        self._owed = 0  # input characters that the stage has consumed but that are not mapped to sent text yet

    def follow(self, before: list[TextPart], after: list[TextPart], *, is_last: bool) -> list[TextPart]:
        """Return parts that pair sent text with the output of the stage. `before` is the input of the stage, and
        `after` is its output.
        """
        self._before.extend(before)
        parts: list[TextPart] = []
        for part in after:
            parts += self._unspoken()
            self._spoken.append(part.spoken)
            self._owed += len(part.written)
            self._find()
            if not self._owed:
                parts.append(self._take())
        if is_last:
            parts += self._unspoken()
            self._owed += sum(len(part.spoken) for part in self._before)
            self._find()
            parts += [self._take()] if self._written or self._spoken else []
        return parts

    def _unspoken(self) -> list[TextPart]:
        """Remove and return the next sent parts that give the stage no input, if all earlier text has been mapped."""
        parts = []
        while not self._owed and not self._written and self._before and not self._before[0].spoken:
            parts.append(self._before.popleft())
        return parts

    def _find(self) -> None:
        while self._owed > 0 and self._before:
            part = self._before.popleft()
            if len(part.spoken) > self._owed and part.written == part.spoken:
                self._before.appendleft(TextPart(part.written[self._owed :], part.spoken[self._owed :]))
                part = TextPart(part.written[: self._owed], part.spoken[: self._owed])
            self._written.append(part.written)
            self._owed -= len(part.spoken)

    def _take(self) -> TextPart:
        part = TextPart("".join(self._written), "".join(self._spoken))
        self._written.clear()
        self._spoken.clear()
        return part


class LivePlain:
    """Incremental version of `clean`. Where the text is split does not affect the result."""

    def __init__(self) -> None:
        self._rest = ""
        self._space = ""  # the space before the next word
        self._has_spoken = False

    def feed(self, text: str, *, is_last: bool) -> list[TextPart]:
        """Return the spoken text that later parts cannot change, or all remaining text if `is_last`."""
        self._rest += text
        takes_all = is_last or len(self._rest) > _LONGEST_REST
        end = len(self._rest) if takes_all else _last_boundary(self._rest)
        known, self._rest = self._rest[:end], self._rest[end:]
        return [TextPart(word, self._spoken(word)) for word in _WORDS.findall(known)]

    @property
    def will_speak(self) -> bool:
        return is_speakable(clean(self._rest))

    def _spoken(self, word: str) -> str:
        """Return the cleaned word, with a leading space unless the word is the first one."""
        if word[:1].isspace():
            self._space = " " if self._has_spoken else ""
        spoken = clean(word)
        if not spoken:
            return ""
        spoken, self._space, self._has_spoken = self._space + spoken, "", True
        return spoken


def _last_boundary(text: str) -> int:
    """Return the last position in `text` at which later characters cannot combine with earlier ones, or 0."""
    for place in range(len(text) - 1, max(0, len(text) - _LONGEST_CLUSTER), -1):
        char = text[place]
        if char.isspace() or unicodedata.category(char)[0] not in "MC":
            before, behind = _normal(text[:place]), _normal(text[place:])
            if before + behind == _normal(text):
                return place
    return 0


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text)
