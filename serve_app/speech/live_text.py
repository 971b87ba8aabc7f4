"""Text that is written while it is spoken: an utterance whose text comes in parts, cut anywhere.

A part becomes spoken text as soon as nothing that follows can change that, and goes into the mailbox of the segment
that is being spoken; talkers read it there. Longer texts go on in further segments. While the writer pauses, the sound
fades into silence.
"""

import asyncio
import re
import secrets
import time
import unicodedata
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Self

import numpy as np

from deployments.errors import InvalidRequest
from deployments.playback import PlaybackClock
from deployments.protocol import Mailbox, ModelInfo, PcmChunk, SynthesisRequest
from deployments.serving.mailbox import MailboxServer, WrittenText
from deployments.voice.live_english import LiveEnglish, TextPart
from serve_app.speech.characters import clean, is_speakable
from serve_app.speech.markup import LiveSpeakable
from serve_app.speech.segments import Segments, heed, segment_request, segment_start
from serve_app.speech.splitting import LiveSplit

_IDLE_S = 60.0
_FADE_S = 0.01
_SAMPLE_BYTES = 2
# So long before a player that began with the first audio runs dry, the end of the sound goes to it.
_MARGIN_S = 0.06
_TOKEN_BYTES = 16
_PLENTY_CHARS = 40  # speech of so many is heard, whatever its writer does
_LONGEST_CLUSTER = 64  # places to look at: no language stacks more marks (Unicode's stream-safe format allows 30)
_LONGEST_REST = 1024  # characters that join with the next ones; ordinary text has none of these
TURN_CHARS = 256  # that become spoken text in one turn of the event loop: milliseconds


class LiveTexts:
    """The live texts of one ingress process, which talkers read at its address."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """`host` is the address of this node, under which talkers on other nodes reach it."""
        self.server = MailboxServer(host, port)
        self._open: dict[str, LiveText] = {}

    async def open(
        self, request: SynthesisRequest, info: ModelInfo, *, max_chars: int, speakable: bool = False
    ) -> "LiveText":
        """An utterance that begins without text. It takes at most `max_chars` characters, and is finished where none
        has come for a minute. Where it is made `speakable`, markup is left out, and its pauses are kept.

        Raises OSError where nothing can listen at the address.
        """
        await self.server.start()
        markup = LiveSpeakable() if speakable else None
        return LiveText(self, request, info, max_chars=max_chars, markup=markup)

    def find(self, mailbox: Mailbox) -> "LiveText | None":
        """The text whose first segment is in `mailbox`; None of one that is closed."""
        return self._open.get(mailbox.token)

    def share(self, live: "LiveText", text: WrittenText) -> Mailbox:
        mailbox = self.server.share(secrets.token_hex(_TOKEN_BYTES), text)
        self._open[mailbox.token] = live
        return mailbox

    def forget(self, mailbox: Mailbox) -> None:
        self._open.pop(mailbox.token, None)
        self.server.remove(mailbox.token)

    async def aclose(self) -> None:
        await self.server.aclose()


class LiveText(Segments):
    """One utterance while it is written. `request` asks a synthesizer to speak it, beginning at once."""

    def __init__(
        self,
        texts: LiveTexts,
        request: SynthesisRequest,
        info: ModelInfo,
        *,
        max_chars: int,
        markup: LiveSpeakable | None,
    ) -> None:
        super().__init__("", [])
        self._texts, self._max_chars, self._markup = texts, max_chars, markup
        self._new_front = LiveEnglish if info.spoken_form == "english" else LivePlain
        self._front = self._new_front()
        self._pauses_s: dict[int, float] = {}  # in front of segments
        self._split = LiveSplit(info.max_segment_chars)
        self._waiting = ""  # has not become spoken text yet
        self._turn: asyncio.Handle | None = None  # in which more of it becomes spoken text
        self._num_chars = self._num_spoken = self._num_spoken_chars = 0
        self._changed = asyncio.Event()
        self._writing: WrittenText | None = None  # the segment that takes the text
        self._mailboxes: list[WrittenText] = []  # by segment
        self._asked = replace(request, text="", following=())
        self._idling: asyncio.TimerHandle | None = None
        self.parts: list[TextPart] = []  # as written and as spoken
        self.text = ""  # all that was written so far, without markup where that is left out
        self.is_written = False  # no more is appended
        self.is_over = False  # nor becomes spoken text
        self._begin_segment()
        self._be_patient()

    @property
    def request(self) -> SynthesisRequest:
        """The request to a synthesizer, for use after `wait_for_words`."""
        return self._segments[0]

    def append(self, text: str) -> None:
        """The text goes on with `text`, of which a long one becomes spoken text by and by.

        Raises InvalidRequest where it becomes too long, and takes nothing of `text` then. Text that comes too late,
        after the end, is an error of the caller.
        """
        assert not self.is_written, "a finished text takes no more"
        if self._num_chars + len(text) > self._max_chars:
            message = f"The text has more than {self._max_chars} characters: send it in several utterances."
            raise InvalidRequest(message, "text", "string_above_max_length")
        self._num_chars += len(text)
        self._be_patient()
        self._waiting += text
        if self._turn is None:
            self._take_in()

    def finish(self) -> None:
        """There is no more text. The speech ends when all of it has been spoken."""
        self.is_written = True
        if self._turn is None and not self.is_over:
            self._finish()

    def close(self) -> None:
        """Forget the text: its speech has ended or is to end."""
        self._end()
        for segment in self._segments:
            assert segment.live is not None
            self._texts.forget(segment.live)

    async def wait_for_words(self) -> bool:
        """Wait until there certainly is something to say; False where the text ends without anything to say.

        The first word may still be on its way; the talker gets ready meanwhile.
        """
        while not (self.is_over or self._num_spoken or self._front.will_speak):
            await self._changed.wait()
        return not self.is_over or self._num_spoken > 0

    async def is_plenty(self) -> None:
        """Wait until speech has to wait for its writer no more before it is heard."""
        while not self.is_over and self._num_spoken_chars < _PLENTY_CHARS:
            await self._changed.wait()

    async def segment(self, number: int) -> SynthesisRequest | None:
        while (known := self.known_segment(number)) is None and not self.is_over:
            await self._changed.wait()
        return known

    def is_last(self, number: int) -> bool:
        return self.is_over and number == len(self._segments) - 1 and number + 1 not in self._pauses_s

    def pause_s(self, number: int) -> float:
        return self._pauses_s.get(number, 0.0)

    def start(self, number: int) -> int:
        spoken = "".join(part.spoken for part in self.parts)
        return segment_start(spoken, [each.text for each in self._mailboxes[:number]])

    def leave(self, number: int) -> None:
        """The speech of a segment has ended: further text goes into another segment."""
        if number == len(self._segments) - 1 and self._writing is not None:
            self._split.restart()
            self._end_segment()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take_in(self) -> None:
        """A part of the waiting text becomes spoken text, and the next part in the next turn of the event loop."""
        part, self._waiting = self._waiting[:TURN_CHARS], self._waiting[TURN_CHARS:]
        self._write(part, is_last=False)
        self._turn = asyncio.get_running_loop().call_soon(self._take_in) if self._waiting else None
        if self._turn is None and self.is_written:
            self._finish()

    def _finish(self) -> None:
        self._write("", is_last=True)
        self._end_sentence()
        self._end()

    def _write(self, text: str, *, is_last: bool) -> None:
        if self._markup is None:
            self._write_prose(text)
            return
        for said in self._markup.feed(text, is_last=is_last):
            if isinstance(said.spoken, str):
                self._write_prose(said.spoken)
            else:
                self._pause(said.spoken.seconds)

    def _write_prose(self, text: str) -> None:
        self.text += text
        self._say(self._front.feed(text, is_last=False))

    def _end_sentence(self) -> None:
        """The text so far is complete: later text does not join with it."""
        self._say(self._front.feed("", is_last=True))
        self._say_certain(self._split.finish())
        self._front = self._new_front()

    def _pause(self, seconds: float) -> None:
        """The segment ends; one that has no text yet comes later."""
        self._end_sentence()
        if self._writing is not None and self._writing.text:
            self._split.restart()
            self._end_segment()
        number = len(self._segments) - (self._writing is not None)
        self._pauses_s[number] = self._pauses_s.get(number, 0.0) + seconds
        self._tell()

    def _say(self, parts: list[TextPart]) -> None:
        self.parts += parts
        for part in parts:
            self._num_spoken += sum(map(is_speakable, part.spoken.split()))
            self._num_spoken_chars += len(part.spoken)
            self._say_certain(self._split.feed(part.spoken))
        self._tell()

    def _say_certain(self, texts: list[str]) -> None:
        """Text of the segment that is being spoken; each but the last ends one."""
        for number, text in enumerate(texts):
            if number:
                self._end_segment()
            if text and self._writing is None:
                self._begin_segment()
            if text and self._writing is not None:
                self._writing.append(text)

    def _begin_segment(self) -> None:
        self._writing = WrittenText()
        self._mailboxes.append(self._writing)
        mailbox = self._texts.share(self, self._writing)
        self._segments.append(segment_request(replace(self._asked, live=mailbox), len(self._segments) + 1))

    def _end_segment(self) -> None:
        if self._writing is not None:
            self._writing.finish()
        self._writing = None

    def _end(self) -> None:
        self.is_written = self.is_over = True
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._end_segment()
        if self._idling is not None:
            self._idling.cancel()
        self._tell()

    def _be_patient(self) -> None:
        if self._idling is not None:
            self._idling.cancel()
        self._idling = asyncio.get_running_loop().call_later(_IDLE_S, self.finish)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def without_clicks(
    chunks: AsyncGenerator[PcmChunk, None], sample_rate: int, *, may_pause: Callable[[], bool]
) -> AsyncGenerator[PcmChunk, None]:
    """`chunks`, whose last 10 ms are held back as long as they `may_pause`: if so, they end the sound softly.

    Speech that is not interrupted comes as it is, sample by sample.
    """
    size = int(_FADE_S * sample_rate) * _SAMPLE_BYTES
    clock, held, last, is_silent = PlaybackClock(), b"", None, False
    coming: asyncio.Future[PcmChunk | None] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(chunks, None))
            coming.add_done_callback(heed)
            if held and last is not None:
                await asyncio.wait((coming,), timeout=max(0.0, clock.lead_s(time.monotonic()) - _MARGIN_S))
                if not coming.done() and may_pause():
                    yield replace(last, pcm=_faded(held, np.linspace(1, 0, len(held) // _SAMPLE_BYTES)))
                    held, is_silent = b"", True
            chunk = await coming
            if chunk is None:
                return
            pcm = chunk.pcm
            if is_silent and pcm:
                pcm, is_silent = _faded(pcm[:size], np.linspace(0, 1, min(size, len(pcm)) // 2)) + pcm[size:], False
            pcm, held = held + pcm, b""
            if chunk.finish_reason is None and may_pause():
                pcm, held = pcm[:-size], pcm[-size:]
            clock.deliver(len(pcm) / _SAMPLE_BYTES / sample_rate, now_s=time.monotonic())
            last = chunk.emptied()
            yield replace(chunk, pcm=pcm)
    finally:
        try:
            if coming is not None and not coming.done():
                coming.cancel()
                await asyncio.wait((coming,))
        finally:  # also where the waiting task is cancelled; a task that still runs has been cancelled itself
            if coming is None or coming.done():
                await chunks.aclose()


def _faded(pcm: bytes, gains: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> bytes:
    return (np.frombuffer(pcm, "<i2") * gains).astype("<i2").tobytes()


class LivePlain:
    """`clean` of a text that comes in parts: wherever it is cut, the same comes out."""

    def __init__(self) -> None:
        self._rest = ""
        self._space = ""  # that stands before the next word, if there is one
        self._has_spoken = False

    def feed(self, text: str, *, is_last: bool) -> list[TextPart]:
        """The spoken text that is certain once `text` has come; with the last part all of the rest."""
        self._rest += text
        takes_all = is_last or len(self._rest) > _LONGEST_REST
        end = len(self._rest) if takes_all else _last_boundary(self._rest)
        known, self._rest = self._rest[:end], self._rest[end:]
        return [TextPart(word, self._spoken(word)) for word in _words(known)]

    @property
    def will_speak(self) -> bool:
        return is_speakable(clean(self._rest))

    def _spoken(self, word: str) -> str:
        """Spaces between words, none before the first and after the last."""
        if word[:1].isspace():
            self._space = " " if self._has_spoken else ""
        spoken = clean(word)
        if not spoken:
            return ""
        spoken, self._space, self._has_spoken = self._space + spoken, "", True
        return spoken


def _words(text: str) -> list[str]:
    """`text` in pieces that begin with whitespace or at its beginning."""
    return re.findall(r"\s*\S+|\s+", text)


def _last_boundary(text: str) -> int:
    """The last place in `text` at which no later character can join with an earlier one; 0 if it is far back."""
    for place in range(len(text) - 1, max(0, len(text) - _LONGEST_CLUSTER), -1):
        char = text[place]
        if char.isspace() or unicodedata.category(char)[0] not in "MC":
            before, behind = _normal(text[:place]), _normal(text[place:])
            if before + behind == _normal(text):
                return place
    return 0


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text)
