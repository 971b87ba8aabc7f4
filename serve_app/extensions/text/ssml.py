"""Parse SSML attributes, and check that a text is valid and supported SSML. The check reports the first error."""

import html
import re
from collections import Counter
from xml.parsers import expat

from deployments.errors import InvalidRequest

MAX_PAUSE_S = 10.0
STRENGTHS_S = {"none": 0.0, "x-weak": 0.1, "weak": 0.2, "medium": 0.4, "strong": 0.8, "x-strong": 1.2}
RATES = {"x-slow": 0.5, "slow": 0.75, "medium": 1.0, "default": 1.0, "fast": 1.25, "x-fast": 1.75}
SLOWEST, FASTEST = 0.25, 4.0
SPELLED = ("characters", "spell-out", "verbatim", "digits", "telephone")

_NAMED = re.compile(r"""([A-Za-z_:][\w:.-]*)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'<>=]+))""")
_SECONDS = re.compile(r"\s*([+-]?\d*\.?\d+)\s*(ms|s)\s*", re.I)
_NUMBER = re.compile(r"\s*(\d*\.?\d+)\s*(%?)\s*")
_ROOT = b"<t>"
_DECLARATION = re.compile(r"\s*<\?xml\s[^<>]*\?>")
_TIME = re.compile(r"\s*\+?(?:\d+\.?\d*|\.\d+)\s*(?:ms|s)\s*", re.I)
_RATE = re.compile(r"\s*(?:\d+\.?\d*|\.\d+)\s*%?\s*")
_LONGEST_SHOWN = 40


class SsmlCheck:
    """Checker for SSML text, which may arrive incrementally. `<speak>` is optional, and a DOCTYPE is an error."""

    def __init__(self, field: str) -> None:
        """`field` is what errors call the text."""
        self._field = field
        self._content = bytearray()
        self._place: int | None = None  # byte position of the rejected element
        self._failed: InvalidRequest | None = None
        self.without_effect: Counter[str] = Counter()
        self._parser = expat.ParserCreate()
        self._parser.StartElementHandler = self._begin
        self._parser.Parse(_ROOT, False)

    def feed(self, text: str, *, is_last: bool) -> None:
        """Check the next part. Raises InvalidRequest with field and position. All later calls then raise it again."""
        if self._failed is not None:
            raise self._failed
        if not self._content and (declared := _DECLARATION.match(text)):
            text = " " * declared.end() + text[declared.end() :]
        content = text.encode()
        self._content += content
        try:
            self._parser.Parse(content, False)
            if is_last:
                self._parser.Parse(b"</t>", True)
        except expat.ExpatError as error:
            self._failed = self._fault(expat.ErrorString(error.code), self._parser.ErrorByteIndex)
            raise self._failed from None

    def _fault(self, reason: str, place: int) -> InvalidRequest:
        at = len(self._content[: max(0, place - len(_ROOT))].decode(errors="ignore"))
        message = f"{self._field}: invalid SSML at character {at}: {reason}."
        return InvalidRequest(message, self._field, "invalid_ssml")

    def _begin(self, name: str, values: dict[str, str]) -> None:
        reason = self._reason(name.lower().split(":")[-1], {key.lower(): value for key, value in values.items()})
        if reason is not None:
            self._failed = self._fault(reason, self._parser.CurrentByteIndex)
            raise self._failed

    def _reason(self, name: str, values: dict[str, str]) -> str | None:
        """Return why an element is rejected, or None."""
        match name:
            case "phoneme":
                return "phonemes are not supported. Use <sub alias='...'> with a respelling, or send a lexicon"
            case "break":
                return self._of_break(values)
            case "prosody":
                self.without_effect.update(f"prosody {key[:20]}" for key in values.keys() - {"rate", "volume", "pitch"})
                return self._of_rate(values.get("rate"), rate(values))
            case "sub" if "alias" not in values:
                return "sub requires an alias attribute"
            case "say-as" if "interpret-as" not in values:
                return "say-as requires an interpret-as attribute"
            case "say-as" if values["interpret-as"] not in SPELLED:
                self.without_effect[f"say-as {values['interpret-as'][:20]}"] += 1
        return None

    @staticmethod
    def _of_break(values: dict[str, str]) -> str | None:
        time, strength = values.get("time"), values.get("strength", "medium")
        if time is not None and not (_TIME.fullmatch(time) and pause_s(values) <= MAX_PAUSE_S):
            return f"break time {time[:_LONGEST_SHOWN]!r} is invalid. Use 0s to {MAX_PAUSE_S:g}s, such as 500ms"
        if strength not in STRENGTHS_S:
            return f"break strength {strength[:_LONGEST_SHOWN]!r} is unknown. Use {', '.join(STRENGTHS_S)}"
        return None

    @staticmethod
    def _of_rate(named: str | None, factor: float) -> str | None:
        if named is None or named in RATES or (_RATE.fullmatch(named) and SLOWEST <= factor <= FASTEST):
            return None
        known = ", ".join(RATES)
        return f"prosody rate {named[:_LONGEST_SHOWN]!r} is invalid. Use {known}, or {SLOWEST:.0%} to {FASTEST:.0%}"


def attributes(tag: str) -> dict[str, str]:
    """Parse a tag's attributes from the text after its name."""
    return {key.lower(): html.unescape(a or b or c) for key, a, b, c in _NAMED.findall(tag)}


def pause_s(values: dict[str, str]) -> float:
    """Return the length of an SSML break in seconds, from its attributes."""
    stated = _SECONDS.fullmatch(values.get("time", ""))
    if stated is None:
        return STRENGTHS_S.get(values.get("strength", "medium"), STRENGTHS_S["medium"])
    return max(0.0, float(stated[1]) / (1000 if stated[2].lower() == "ms" else 1))


def rate(values: dict[str, str]) -> float:
    """Return the speed factor of a `<prosody rate>`, or 1 if the rate is invalid."""
    named = values.get("rate", "medium")
    stated = _NUMBER.fullmatch(named)
    if stated is None:
        return RATES.get(named, 1.0)
    return float(stated[1]) / (100 if stated[2] else 1) or 1.0
