"""Turns of a session, and events that report the progress of their speech."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deployments.errors import InvalidRequest
from deployments.protocol import FinishReason
from serve_app.api.request_record import RequestRecord, Usage
from serve_app.extensions.live.live_text import LiveText
from serve_app.extensions.word_times.word_times import Spoken, WordTimes
from serve_app.speech.observers import Word
from serve_app.speech.segments import Utterance
from serve_app.text.characters import CJK, is_ideograph, repair_surrogates

_CJK_SPACE = re.compile(rf"(?<={CJK})\s+(?={CJK})")


@dataclass(slots=True)
class Turn:
    """Text that the session speaks as one utterance, and the progress of its speech."""

    number: int  # starts at 1
    record: RequestRecord
    text: str = ""  # all text received so far
    half: str = ""  # half of a surrogate pair at the end of that text
    is_complete: bool = False
    utterance: Utterance | None = None  # None until the speech starts
    live: LiveText | None = None  # None if the turn is spoken only once it is complete
    num_taken: int = 0  # number of characters already passed on to be spoken
    times: WordTimes | None = None  # None if the client did not request word times
    start_s: float | None = None  # start of the audio since the last `clear`; None before the audio starts
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def usage(self) -> Usage:
        return self.record.usage

    @property
    def finish_reason(self) -> FinishReason:
        """The reason why the speech ended. Valid only after the end."""
        return self.usage.finish_reason or FinishReason.STOP

    @property
    def takes_text(self) -> bool:
        """Whether the turn accepts text. A live text ends by itself if no text has been added for a long time."""
        return not self.is_complete and not (self.live is not None and self.live.is_complete)

    def take(self) -> str:
        """Return the text that has not been passed on to be spoken yet, without spaces between ideographs."""
        end = len(self.text) if self.is_complete else _end_of_certain(self.text)
        before = self.text[max(0, self.num_taken - 1) : self.num_taken]
        text, self.num_taken = self.text[self.num_taken : end], max(end, self.num_taken)
        return _without_cjk_spaces(before + text)[len(before) :]

    def spoken(self, played_s: float) -> Spoken | None:
        """Return the text heard after `played_s` seconds of the session's audio, or None if there are no word times."""
        if self.start_s is None or played_s <= self.start_s:
            return Spoken("", self.text, last_word=None)
        if self.times is None or not self.times.are_known:
            return None
        heard = self.times.spoken(played_s - self.start_s)
        end = _end_of_visible(self.text, len("".join(heard.text_spoken.split())))
        return replace(heard, text_spoken=self.text[:end], text_remaining=self.text[end:])

    def write(self) -> None:
        """Append new text to the live text. Raises InvalidRequest if the live text becomes too long."""
        if self.live is not None and not self.live.is_complete:
            self.live.append(self.take())
            if self.is_complete:
                self.live.finish()
        self.changed.set()


@dataclass(frozen=True, slots=True)
class Started:
    """Event before the first audio of a turn."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Audio:
    """Event with the next audio bytes in the output format. Raw formats contain whole samples."""

    turn: Turn
    data: bytes


@dataclass(frozen=True, slots=True)
class Words:
    """Event with the next word times, in seconds of the turn's audio. The audio itself may arrive earlier or later."""

    turn: Turn
    words: tuple[Word, ...]

    def in_session(self) -> list[Word]:
        """Return the words with times in seconds of the session's audio."""
        before_s = self.turn.start_s or 0.0
        return [replace(word, start_s=word.start_s + before_s, end_s=word.end_s + before_s) for word in self.words]


@dataclass(frozen=True, slots=True)
class Flushed:
    """Event after all text of a turn, up to its `flush`, has been spoken."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Cleared:
    """Event after which no events of the dropped `turns` follow.

    `heard` is the turn that was playing at `played_s`, or the turn in progress if the client did not send it.
    `spoken` is the part of its text that was heard, or None if there are no word times or no `played_s`.
    """

    turns: tuple[Turn, ...]
    heard: Turn | None = None
    spoken: Spoken | None = None


@dataclass(frozen=True, slots=True)
class Rest:
    """Event with the remaining bytes of the audio encoder after the last turn."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """Event after all text of a closed session has been spoken.

    `finish_reason` is the first one other than STOP in any turn, or else STOP. `answer` belongs to the last turn.
    """

    finish_reason: FinishReason
    answer: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Failed:
    """Event that ends a failed session."""

    error: Exception


# An InvalidRequest event reports a turn without speakable text. The turn then consists of a short silence.
Event = Started | Audio | Words | InvalidRequest | Flushed | Cleared | Rest | Done | Failed


def whole_characters(text: str) -> tuple[str, str]:
    """Join surrogate pairs into characters. Also return a trailing high surrogate, whose pair may follow later."""
    end = len(text) - ("\ud800" <= text[-1:] <= "\udbff")
    return repair_surrogates(text[:end]), text[end:]


def _without_cjk_spaces(text: str) -> str:
    """Remove spaces between ideographs, because clients split text there and add spaces."""
    return _CJK_SPACE.sub("", text)


def _end_of_certain(text: str) -> int:
    """Return the end of the stable part of `text`. Spaces after a final ideograph are not stable, because another
    ideograph may follow.
    """
    stripped = text.rstrip()
    return len(stripped) if is_ideograph(stripped[-1:]) else len(text)


def _end_of_visible(text: str, num_visible: int) -> int:
    """Return the offset in `text` after `num_visible` characters, not counting spaces."""
    ends = [place for place, char in enumerate(text, start=1) if not char.isspace()]
    return ends[min(num_visible, len(ends)) - 1] if num_visible and ends else 0
