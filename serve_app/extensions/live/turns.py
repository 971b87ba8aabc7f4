"""The turns of a session, and the events that report the progress of their speech."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deployments.errors import InvalidRequest
from deployments.protocol import FinishReason
from serve_app.api.request_record import RequestRecord, Usage
from serve_app.extensions.live.live_text import LiveText
from serve_app.extensions.word_times.word_times import Spoken, WordTimes
from serve_app.speech.segments import Utterance
from serve_app.speech.words import Word
from serve_app.text.characters import end_of_certain, end_of_visible, without_cjk_spaces


@dataclass(slots=True)
class Turn:
    """Text that is spoken as one utterance, and the progress of its speech."""

    number: int  # from 1
    record: RequestRecord
    text: str = ""  # the whole text so far
    half: str = ""  # half of a surrogate pair that follows the text
    is_complete: bool = False
    utterance: Utterance | None = None  # None until speech is requested
    live: LiveText | None = None  # None if it is spoken once it is complete
    num_taken: int = 0  # characters that are being spoken, or have been
    times: WordTimes | None = None  # None if the client did not request word times
    start_s: float | None = None  # start of its audio, counted from the last `clear`; None: it has none
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def usage(self) -> Usage:
        return self.record.usage

    @property
    def finish_reason(self) -> FinishReason:
        """Why its speech ended. Valid only once it has."""
        return self.usage.finish_reason or FinishReason.STOP

    @property
    def takes_text(self) -> bool:
        """Whether text may be added. A live text ends by itself if nothing is added for a long time."""
        return not self.is_complete and not (self.live is not None and self.live.is_complete)

    def take(self) -> str:
        """The text not taken yet, without spaces between ideographs."""
        end = len(self.text) if self.is_complete else end_of_certain(self.text)
        before = self.text[max(0, self.num_taken - 1) : self.num_taken]
        text, self.num_taken = self.text[self.num_taken : end], max(end, self.num_taken)
        return without_cjk_spaces(before + text)[len(before) :]

    def spoken(self, played_s: float) -> Spoken | None:
        """The part of its text heard after `played_s` of the session's audio; None without word times."""
        if self.start_s is None or played_s <= self.start_s:
            return Spoken("", self.text, last_word=None)
        if self.times is None or not self.times.are_known:
            return None
        heard = self.times.spoken(played_s - self.start_s)
        end = end_of_visible(self.text, len("".join(heard.text_spoken.split())))
        return replace(heard, text_spoken=self.text[:end], text_remaining=self.text[end:])

    def write(self) -> None:
        """Pass new text on to the live text. Raises InvalidRequest if that becomes too long."""
        if self.live is not None and not self.live.is_complete:
            self.live.append(self.take())
            if self.is_complete:
                self.live.finish()
        self.changed.set()


@dataclass(frozen=True, slots=True)
class Started:
    """A turn's audio follows."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Audio:
    """The next bytes in the output's format; raw formats have whole samples."""

    turn: Turn
    data: bytes


@dataclass(frozen=True, slots=True)
class Words:
    """When the next words of a turn are heard, in seconds of its audio, which may be sent before or after."""

    turn: Turn
    words: tuple[Word, ...]

    def in_session(self) -> list[Word]:
        """The words, with times in seconds of the session's audio."""
        before_s = self.turn.start_s or 0.0
        return [replace(word, start_s=word.start_s + before_s, end_s=word.end_s + before_s) for word in self.words]


@dataclass(frozen=True, slots=True)
class Flushed:
    """All text of a turn, up to its `flush`, has been spoken."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Cleared:
    """Earlier turns were dropped: no more events of them follow.

    `heard`: the turn that was playing at `played_s`, if the client sent it, else the turn being made. `spoken`: how
    much of its text was heard; None without word times or `played_s`.
    """

    turns: tuple[Turn, ...]
    heard: Turn | None = None
    spoken: Spoken | None = None


@dataclass(frozen=True, slots=True)
class Rest:
    """Bytes that the audio encoder had left after the last turn."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """All of a closed session is spoken. `finish_reason`: the first of its turns but STOP. `answer`: the last's."""

    finish_reason: FinishReason
    answer: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Failed:
    """The session has ended with an error."""

    error: Exception


# InvalidRequest: none of a turn's text can be spoken. The turn continues to its end, with a moment of silence.
Event = Started | Audio | Words | InvalidRequest | Flushed | Cleared | Rest | Done | Failed
