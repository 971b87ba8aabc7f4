"""An utterance whose text the client still writes while it is spoken. Its parts may be cut anywhere.

A part becomes spoken text as soon as no later part can change it. The spoken text goes into the mailbox of the current
segment, where a talker reads it. A text that is too long for one segment goes on in the next one. While the client
pauses, the sound fades into silence.
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
from deployments.listener import Listener
from deployments.protocol import Mailbox, ModelInfo, PcmChunk, SynthesisRequest
from deployments.serving.mailbox import MailboxServer, WrittenText
from deployments.voice.live_english import LiveEnglish, TextPart
from serve_app.speech.characters import clean, is_speakable
from serve_app.speech.markup import LiveSpeakable
from serve_app.speech.segments import Segments, heed, segment_request, segment_start
from serve_app.speech.splitting import LiveSplit

_IDLE_S = 60.0  # a text to which nothing is added for so long is finished
_FADE_S = 0.01
_SAMPLE_BYTES = 2
_MARGIN_S = 0.06  # faded sound is sent so long before a player without a buffer runs dry
_TOKEN_BYTES = 16
_PLENTY_CHARS = 40  # so many characters make audio, even if the client writes no more
_LONGEST_CLUSTER = 64  # characters to search for a boundary; Unicode's stream-safe format stacks at most 30 marks
_LONGEST_REST = 1024  # characters without a boundary that are kept; ordinary text has far fewer
TURN_CHARS = 256  # become spoken text in one turn of the event loop, which takes milliseconds


class LiveTexts:
    """The live texts of one ingress process, and the address at which talkers read them."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """`host`: this node's address for talkers on other nodes."""
        self.server = MailboxServer(host, port)
        self._open: dict[str, LiveText] = {}

    async def open(
        self, request: SynthesisRequest, info: ModelInfo, *, max_chars: int, speakable: bool = False
    ) -> "LiveText":
        """An utterance without text so far. It takes at most `max_chars` characters, and ends after a minute without
        any. With `speakable` markup is not spoken, and the pauses that markup asks for are made.

        Raises OSError where the address cannot be listened at.
        """
        await self.server.start()
        markup = LiveSpeakable() if speakable else None
        return LiveText(self, request, info, max_chars=max_chars, markup=markup)

    def find(self, mailbox: Mailbox) -> "LiveText | None":
        """The text whose first segment is in `mailbox`; None once it is closed."""
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
    """One utterance while it is written. A synthesizer can speak its `request` from the beginning."""

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
        self._waiting = ""  # text that has not become spoken text yet
        self._turn: asyncio.Handle | None = None  # the turn of the event loop that takes in more of it
        self._num_chars = self._num_spoken = self._num_spoken_chars = 0
        self._changed = asyncio.Event()
        self._writing: WrittenText | None = None  # the segment that takes the text
        self._mailboxes: list[WrittenText] = []  # by segment
        self._asked = replace(request, text="", following=())
        self._idling: asyncio.TimerHandle | None = None
        self.parts: list[TextPart] = []  # the text so far, as written and as spoken
        self.text = ""  # the text so far, without the markup that is not spoken
        self.is_written = False  # the client adds no more
        self.is_over = False  # and all of it has become spoken text
        self._begin_segment()
        self._be_patient()

    @property
    def request(self) -> SynthesisRequest:
        """The request to a synthesizer, for use after `wait_for_words`."""
        return self._segments[0]

    def append(self, text: str) -> None:
        """Add to the text. A long addition becomes spoken text over several turns of the event loop.

        Raises InvalidRequest where the text would become too long, and adds nothing then. The caller adds nothing after
        `finish`.
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
        """The text is complete. The speech ends when all of it has been spoken."""
        self.is_written = True
        if self._turn is None and not self.is_over:
            self._finish()

    def close(self) -> None:
        """Forget the text, and end its speech."""
        self._end()
        for segment in self._segments:
            assert segment.live is not None
            self._texts.forget(segment.live)

    async def wait_for_words(self) -> bool:
        """Wait until the text is sure to have a word; False where it ends without one.

        The word may be incomplete. The talker can prepare while the rest of it comes.
        """
        while not (self.is_over or self._num_spoken or self._front.will_speak):
            await self._changed.wait()
        return not self.is_over or self._num_spoken > 0

    async def is_plenty(self) -> None:
        """Wait until the text is long enough for first audio, whatever the client writes next."""
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
        """The speech of a segment has ended: later text goes into the next segment."""
        if number == len(self._segments) - 1 and self._writing is not None:
            self._split.restart()
            self._end_segment()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take_in(self) -> None:
        """Make spoken text of TURN_CHARS waiting characters, and of the next ones in the event loop's next turn."""
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
        """Later text does not join with the text so far."""
        self._say(self._front.feed("", is_last=True))
        self._say_certain(self._split.finish())
        self._front = self._new_front()

    def _pause(self, seconds: float) -> None:
        """End the segment, unless it has no text yet, and put silence in front of the next one."""
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
        """Text for the current segment. Each of `texts` but the last ends a segment."""
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
    """`chunks` without clicks at pauses. Audio without a pause stays as it is.

    While they `may_pause` the last 10 ms are held back, and faded out where no chunk comes in time.
    """
    size = int(_FADE_S * sample_rate) * _SAMPLE_BYTES
    clock, held, last, is_silent = Listener(), b"", None, False
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
    """`clean` for a text that comes in parts. The parts give the same spoken text, however the text is cut."""

    def __init__(self) -> None:
        self._rest = ""
        self._space = ""  # to put in front of the next word
        self._has_spoken = False

    def feed(self, text: str, *, is_last: bool) -> list[TextPart]:
        """The spoken text that no later part can change; with `is_last` all of the rest."""
        self._rest += text
        takes_all = is_last or len(self._rest) > _LONGEST_REST
        end = len(self._rest) if takes_all else _last_boundary(self._rest)
        known, self._rest = self._rest[:end], self._rest[end:]
        return [TextPart(word, self._spoken(word)) for word in _words(known)]

    @property
    def will_speak(self) -> bool:
        return is_speakable(clean(self._rest))

    def _spoken(self, word: str) -> str:
        """The word with a space in front, unless it is the first word."""
        if word[:1].isspace():
            self._space = " " if self._has_spoken else ""
        spoken = clean(word)
        if not spoken:
            return ""
        spoken, self._space, self._has_spoken = self._space + spoken, "", True
        return spoken


def _words(text: str) -> list[str]:
    """`text` in words, each with the whitespace in front of it."""
    return re.findall(r"\s*\S+|\s+", text)


def _last_boundary(text: str) -> int:
    """The last place in `text` at which no later character can combine with an earlier one; 0 if it is not near."""
    for place in range(len(text) - 1, max(0, len(text) - _LONGEST_CLUSTER), -1):
        char = text[place]
        if char.isspace() or unicodedata.category(char)[0] not in "MC":
            before, behind = _normal(text[:place]), _normal(text[place:])
            if before + behind == _normal(text):
                return place
    return 0


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text)
