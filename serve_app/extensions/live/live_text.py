"""Speak an utterance while the client is still writing its text. The client can split the text anywhere.

A part becomes spoken text as soon as later parts cannot change its spoken form. A talker reads the spoken text of the
current segment from a mailbox. A text that exceeds one segment continues in the next segment. If the client stops
writing, the audio fades to silence.
"""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np

from deployments.errors import InvalidRequest
from deployments.listener import Listener
from deployments.protocol import SAMPLE_BYTES, ModelInfo, PcmChunk, SynthesisRequest
from serve_app.extension import ExtensionState
from serve_app.extensions.continuity.tails import Continuation
from serve_app.extensions.live.live_split import LiveSplit
from serve_app.extensions.live.mailbox_server import MailboxServer, WrittenText
from serve_app.extensions.text.spoken_text import CHARS_AT_ONCE, TextReader, TextRules
from serve_app.extensions.text.ssml import SsmlCheck
from serve_app.speech.segments import LiveSegments, StreamTail, Utterance, segment_request, segment_start
from serve_app.speech.utterance_synthesizer import retrieve_error, stop_reading
from serve_app.text.characters import is_speakable
from serve_app.text.spoken import SpokenPiece

_IDLE_S = 60.0  # the text ends if the client has added nothing for this long
_FADE_S = 0.01
_MARGIN_S = 0.06  # send a fade-out this long before a player without a buffer runs dry
_TOKEN_BYTES = 16
# A talker reads one text token per frame of the tail before the first new frame.
_JOINED_CHARS = 80
_PLENTY_CHARS = 40  # enough characters for audio, even if the client never writes more

# Returns the fields of SynthesisRequest that a style changes.
Restyle = Callable[[str], Awaitable[Mapping[str, Any]]]


async def no_change(style: str) -> Mapping[str, Any]:
    """Return an empty change. Serves as `restyle` for texts whose styles have no effect."""
    return {}


class LiveTexts(ExtensionState):
    """Creates live texts in one ingress process, and runs the server from which talkers read them."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """`host` is the address at which talkers on other nodes reach this one."""
        self.server = MailboxServer(host)

    async def open(
        self,
        utterance: Utterance,
        info: ModelInfo,
        *,
        max_chars: int,
        rules: TextRules | None = None,
        restyle: Restyle = no_change,
    ) -> "LiveText":
        """Open an utterance without text. The utterance accepts at most `max_chars` characters, and ends after a minute
        without new text. If `rules` is None, text is spoken as written. `restyle` is called once per style.

        Raises OSError if the mailbox server cannot bind to its address.
        """
        await self.server.start()
        rules = rules or TextRules(spoken_form=info.spoken_form)
        return LiveText(self.server, utterance, info, max_chars=max_chars, rules=rules, restyle=restyle)

    async def aclose(self) -> None:
        await self.server.aclose()


class LiveText(LiveSegments):
    """Utterance whose text is still arriving. Callers can request its speech before any text has arrived."""

    def __init__(
        self,
        server: MailboxServer,
        utterance: Utterance,
        info: ModelInfo,
        *,
        max_chars: int,
        rules: TextRules,
        restyle: Restyle,
    ) -> None:
        utterance = utterance.changed(text="")
        super().__init__(utterance)
        self._server, self._max_chars = server, max_chars
        self._reader = TextReader(rules)
        self._speed, self._style = 1.0, ""
        self._restyle = restyle
        self._restyling: dict[str, asyncio.Future[Mapping[str, Any]]] = {}  # by style
        self._check = SsmlCheck("text") if rules.markup == "ssml" else None
        if self._check is not None:
            self._check.without_effect = self._reader.left_out
        self._split = LiveSplit(min(info.max_segment_chars, rules.max_segment_chars or info.max_segment_chars))
        self._waiting = ""  # text that has not been converted yet
        self._next_take_in: asyncio.Handle | None = None  # the next scheduled call of `_take_in`
        self._num_chars = 0  # in the written text
        self._num_words = 0  # number of speakable words
        self._num_spoken_chars = 0
        self._changed = asyncio.Event()
        self._writing: WrittenText | None = None  # the segment that receives new text
        self._mailboxes: list[WrittenText] = []  # by segment
        self._begun_anew: set[int] = set()  # segments that follow speech that ended before its text did
        self._utterance = utterance
        self._idling: asyncio.TimerHandle | None = None
        self.parts: list[SpokenPiece] = []  # the text received so far, with its spoken form
        self.text = ""  # the text received so far
        self.is_complete = False  # whether the client has finished the text
        self._is_taken_in = False  # whether the text is complete, and all of it has been converted
        self._begin_segment()
        self._be_patient()

    @property
    def utterance(self) -> Utterance:
        """Request for `SpeechModel`, available after `wait_for_words`."""
        first = self.known_segment(0) or self._segments[0]
        styled = {"instructions": first.instructions, "reference": first.reference}
        return replace(self._utterance.changed(mailbox=first.mailbox, **styled), live_text=self)

    async def going_on(self, conversation: Continuation) -> Utterance:
        """Return `utterance`. Continue the previous speech if the client writes enough text in time."""
        if (tail := conversation.tail(self.utterance.synthesis)) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(conversation.patience_s):
                    while not self._is_long(0):
                        await self._changed.wait()
        return self.utterance.changed(tail=tail if self._is_long(0) else None)

    def append(self, text: str) -> None:
        """Append to the text. Convert a long addition over several iterations of the event loop.

        Raises InvalidRequest, and changes nothing, if the text would become too long or is invalid SSML. Do not call
        this method after `finish`.
        """
        assert not self.is_complete, "append was called after finish"
        if self._num_chars + len(text) > self._max_chars:
            message = f"The text has more than {self._max_chars} characters. Split it into several utterances."
            raise InvalidRequest(message, "text", "string_above_max_length")
        if self._check is not None:
            self._check.feed(text, is_last=False)
        self._num_chars += len(text)
        self._be_patient()
        self._waiting += text
        if self._next_take_in is None:
            self._take_in()

    def finish(self) -> None:
        """Mark the text as complete. The speech ends once all of the text has been spoken."""
        self.is_complete = True
        if self._next_take_in is None and not self.is_text_complete:
            self._finish()

    def close(self) -> None:
        """Discard the text and end its speech."""
        self._end()
        for restyling in self._restyling.values():
            restyling.cancel()
        for segment in self._segments:
            assert segment.mailbox is not None
            self._server.remove(segment.mailbox.token)

    async def wait_for_words(self) -> bool:
        """Wait until the text contains a word. Return False if the text ends without a word.

        The word can be incomplete, because the talker can run its prefill while the rest arrives.
        """
        while not (self.is_text_complete or self._num_words or self._reader.will_speak):
            await self._changed.wait()
        await self.segment(0)  # waits for the style of the segment
        return not self.is_text_complete or self._num_words > 0

    @property
    def is_text_complete(self) -> bool:
        return self._is_taken_in

    @property
    def spoken(self) -> str:
        return "".join(part.spoken for part in self.parts)

    @property
    def left_out(self) -> Counter[str]:
        """Counts as in SpokenText for the text received so far. Later text adds to the same counter."""
        return self._reader.left_out

    async def wait_for_first_text(self) -> None:
        while not self.is_text_complete and self._num_spoken_chars < _PLENTY_CHARS:
            await self._changed.wait()

    def smoothed(
        self, chunks: AsyncGenerator[PcmChunk, None], sample_rate: int, listener: Listener
    ) -> AsyncGenerator[PcmChunk, None]:
        return without_clicks(chunks, sample_rate, listener, may_stall=lambda: not self.is_text_complete)

    def known_segment(self, number: int) -> SynthesisRequest | None:
        """Return a segment, or None if its text or its style is not ready yet. Raises the errors of `restyle`."""
        request = super().known_segment(number)
        if request is None or (restyling := self._restyling.get(self.style(number))) is None:
            return request
        return replace(request, **restyling.result()) if restyling.done() else None

    async def segment(self, number: int) -> SynthesisRequest | None:
        while (request := self.known_segment(number)) is None:
            if self.is_text_complete and number >= len(self._segments):
                return None
            await self._changed.wait()
        return request

    def is_last(self, number: int) -> bool:
        return self.is_text_complete and super().is_last(number)

    def segment_text(self, number: int) -> str:
        return self._mailboxes[number].text

    def joined(self, number: int, before: StreamTail) -> SynthesisRequest | None:
        """Return a segment that continues the previous one, if its text is long enough to be spoken immediately, and if
        the previous segment has spoken all of its text.
        """
        joined = super().joined(number, before)
        if joined is None or joined.tail is None:
            return joined
        return joined if self._is_long(number) and number not in self._begun_anew else replace(joined, tail=None)

    def _is_long(self, number: int) -> bool:
        """Return whether the text of a segment is long enough to be spoken immediately after a tail."""
        written = self._mailboxes[number]
        return written.is_complete or len(written.text) >= _JOINED_CHARS

    def start(self, number: int) -> int:
        return segment_start(self.spoken, [mailbox.text for mailbox in self._mailboxes[:number]])

    def close_segment(self, number: int) -> None:
        """End a segment. Later text starts a new segment, which does not continue a tail."""
        if number == len(self._segments) - 1 and self._writing is not None:
            self._split.restart()
            self._end_segment()
            self._begun_anew.add(number + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take_in(self) -> None:
        """Convert CHARS_AT_ONCE waiting characters to spoken text, and schedule the rest on the event loop."""
        part = self._waiting[:CHARS_AT_ONCE]
        self._waiting = self._waiting[CHARS_AT_ONCE:]
        self._write(part, is_last=False)
        self._next_take_in = asyncio.get_running_loop().call_soon(self._take_in) if self._waiting else None
        if self._next_take_in is None and self.is_complete:
            self._finish()

    def _finish(self) -> None:
        self._write("", is_last=True)
        self._say_certain(self._split.finish())
        self._end()

    def _write(self, text: str, *, is_last: bool) -> None:
        self.text += text
        for piece in self._reader.feed(text, is_last=is_last):
            self.parts.append(piece)
            if piece.is_border:
                self._begin_stretch(piece)
                continue
            self._num_words += sum(map(is_speakable, piece.spoken.split()))
            self._num_spoken_chars += len(piece.spoken)
            self._say_certain(self._split.feed(piece.spoken))
        self._notify()

    def _begin_stretch(self, border: SpokenPiece) -> None:
        """End the current segment if it has text, and add the silence that precedes the next segment."""
        self._say_certain(self._split.finish())
        if self._writing is not None and self._writing.text:
            self._split.restart()
            self._end_segment()
        number = len(self._segments) - (self._writing is not None)
        if border.pause_s:
            self._pauses_s[number] = self._pauses_s.get(number, 0.0) + border.pause_s
        self._speed = self._speed if border.speed is None else border.speed
        self._style = self._style if border.style is None else border.style
        if self._writing is not None:
            self._set_manner(number)

    def _say_certain(self, texts: list[str]) -> None:
        """Append text to the current segment. Each of `texts` except the last ends a segment."""
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
        mailbox = self._server.share(secrets.token_hex(_TOKEN_BYTES), self._writing)
        self._set_manner(len(self._segments))
        request = replace(self._utterance.synthesis, mailbox=mailbox)
        self._segments.append(segment_request(request, len(self._segments)))

    def _set_manner(self, number: int) -> None:
        """Set the speed and style of a segment. Start preparing any new style, which may mean reading a recording."""
        self._speeds[number], self._styles[number] = self._speed, self._style
        if self._style and self._style not in self._restyling:
            restyling = self._restyling[self._style] = asyncio.ensure_future(self._restyle(self._style))
            restyling.add_done_callback(retrieve_error)
            restyling.add_done_callback(lambda _: self._notify())

    def _end_segment(self) -> None:
        if self._writing is not None:
            self._writing.finish()
        self._writing = None

    def _end(self) -> None:
        self.is_complete = self._is_taken_in = True
        if self._next_take_in is not None:
            self._next_take_in.cancel()
            self._next_take_in = None
        self._end_segment()
        if self._idling is not None:
            self._idling.cancel()
        self._notify()

    def _be_patient(self) -> None:
        if self._idling is not None:
            self._idling.cancel()
        self._idling = asyncio.get_running_loop().call_later(_IDLE_S, self.finish)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def without_clicks(
    chunks: AsyncGenerator[PcmChunk, None], sample_rate: int, listener: Listener, *, may_stall: Callable[[], bool]
) -> AsyncGenerator[PcmChunk, None]:
    """Yield `chunks` without clicks at stalls. Audio that arrives in time is left unchanged.

    While `may_stall` returns True, hold back the last 10 ms, and fade them out if the next chunk does not arrive in
    time.
    """
    size = int(_FADE_S * sample_rate) * SAMPLE_BYTES
    held = b""  # the last 10 ms, not yet sent
    last: PcmChunk | None = None  # the latest chunk, without audio
    is_silent = False  # whether the audio has faded out
    coming: asyncio.Future[PcmChunk | None] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(chunks, None))
            coming.add_done_callback(retrieve_error)
            if held and last is not None:
                await asyncio.wait((coming,), timeout=max(0.0, listener.lead_s(time.monotonic()) - _MARGIN_S))
                if not coming.done() and may_stall():
                    yield replace(last, pcm=_faded(held, np.linspace(1, 0, len(held) // SAMPLE_BYTES)))
                    held = b""
                    is_silent = True
            chunk = await coming
            if chunk is None:
                return
            pcm = chunk.pcm
            if is_silent and pcm:
                pcm = _faded(pcm[:size], np.linspace(0, 1, min(size, len(pcm)) // 2)) + pcm[size:]
                is_silent = False
            pcm, held = held + pcm, b""
            if chunk.finish_reason is None and may_stall():
                pcm, held = pcm[:-size], pcm[-size:]
            last = chunk.emptied()
            yield replace(chunk, pcm=pcm)
    finally:
        await stop_reading(chunks, coming)


def _faded(pcm: bytes, gains: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> bytes:
    return (np.frombuffer(pcm, "<i2") * gains).astype("<i2").tobytes()
