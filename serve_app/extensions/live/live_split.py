"""Splits a text that is still being written into segments."""

import re
from bisect import bisect_right

from serve_app.text.splitting import AHEAD, CLAUSE, SENTENCE, WORD, ends_sentence, lengths, pattern_ends

_SPACE = re.compile(r"\s")


class LiveSplit:
    """Splitter for text that is spoken while the client is still writing it.

    A segment ends with the first sentence whose end is in the second half of the segment, or with the first clause in
    the last quarter. Otherwise, it ends before the first word that does not fit. Each character is measured only once,
    however the text arrives.
    """

    def __init__(self, max_chars: int) -> None:
        """Create the splitter. `max_chars`: see `split_text`."""
        self._max_chars = max_chars
        self._text = ""  # text of the current segment
        self._given = 0  # number of characters already returned
        self._positions = [0]  # positions in `_text`
        self._sure = 0  # the segment ends at or after this offset
        self._space = self._looked = 0  # last whitespace; sentences and clauses before `_looked` were checked

    def feed(self, text: str) -> list[str]:
        """Return the text that can be spoken now, in one part per segment."""
        texts = [""]
        for start in range(0, len(text), self._max_chars):
            self._add(text[start : start + self._max_chars])
            while end := self._end():
                texts[-1] += self._take(end)
                texts.append("")
                self.restart()
            texts[-1] += self._take(min(max(self._reached(3), self._space), self._sure))
        return texts

    def finish(self) -> list[str]:
        return [self._take(len(self._text))]

    def restart(self) -> None:
        """Start a new segment after the current text."""
        rest = self._text[self._given :]
        self._text = ""
        self._given = 0
        self._positions = [0]
        self._space = 0
        self._looked = 0
        self._add(rest)

    def _add(self, text: str) -> None:
        text = text if self._given else (self._text + text).lstrip()
        if not self._given:
            self._text, self._positions = "", [0]
        before = len(self._text)
        self._text += text
        self._positions += lengths(text, self._positions.pop())
        self._space = max((match.start() for match in _SPACE.finditer(self._text, before)), default=self._space)

    def _take(self, end: int) -> str:
        start, self._given = self._given, max(self._given, end)
        return self._text[start : self._given]

    def _reached(self, quarters: int) -> int:
        """Return the last offset with at most this many quarters of a segment before it."""
        return bisect_right(self._positions, self._max_chars * quarters / 4) - 1

    def _end(self) -> int:
        """Return the end of the segment, or 0 while the segment may continue."""
        text = self._text
        middle, late, limit = map(self._reached, (2, 3, 4))
        self._sure = len(text)
        if middle >= len(text) - 1:
            return 0
        known = len(text) - AHEAD  # whether a sentence ends here depends on the text that follows
        matches = [match for match in SENTENCE.finditer(text, self._looked) if match.end() > middle]
        open_matches = [match for match in matches if match.end() > known]
        ends = [match.end() for match in matches if match.end() > known or ends_sentence(text, match.end())]
        first = min(
            ends + [end for end in pattern_ends(CLAUSE, text, self._looked, len(text)) if end > late], default=len(text)
        )
        if first <= min(known, limit):
            return first
        words = pattern_ends(WORD, text, late, limit + 1) if len(text) > limit else [len(text)]
        last = words[-1] if words else max(1, limit)
        if limit <= known:
            return last
        self._sure = min(first, last)
        self._looked = min(self._space, self._looked if first < len(text) else len(text))
        self._looked = min([self._looked, *(match.start() for match in open_matches)])
        return 0
