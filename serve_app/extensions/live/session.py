"""Speech session: a dialect appends text while the client writes, and receives events while the server speaks."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Self

from starlette.websockets import WebSocketDisconnect

from deployments.errors import InvalidRequest
from deployments.protocol import FinishReason, PcmChunk
from serve_app.api.context import RequestState
from serve_app.api.error_replies import translate
from serve_app.api.parsing.speech_body import SpeechBody, check_length
from serve_app.api.request_record import Usage, start_marks
from serve_app.api.resolve.make_utterance import build_utterance
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.resolve.voice import check_language, unspoken_script
from serve_app.extensions.continuity.tails import Continuation
from serve_app.extensions.live.live_text import LiveText, LiveTexts
from serve_app.extensions.live.turns import (
    Audio,
    Cleared,
    Done,
    Event,
    Failed,
    Flushed,
    Rest,
    Started,
    Turn,
    Words,
    whole_characters,
)
from serve_app.extensions.text.reading import in_style
from serve_app.extensions.text.spoken_text import read, rules_of
from serve_app.extensions.word_times.word_times import Spoken, WordTimes
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import silence
from serve_app.text.characters import is_speakable, repair_surrogates
from serve_app.text.languages import AUTO, DETECT, foreign_language, language_name
from serve_app.text.spoken import SpokenText

MAX_UNSPOKEN_CHARS = 1 << 16  # an hour of speech
_SCRIPT_CHARS = 1000  # prefix for script detection; checking a complete text could block the event loop for 0.3 s
MAX_AUDIO_BYTES = 4096  # per event
_MOST_UNSENT = 8  # maximum number of unread events; decoding waits at this number
_MOST_TURNS = 256  # maximum number of waiting turns


class Session:
    """Sequence of turns, spoken in order. `flush` ends a turn. Iterate over the session to receive its events.

    Decoding pauses while events remain unread. Use a session as an asynchronous context manager, whose exit cancels all
    speech.
    """

    def __init__(
        self,
        resolver: Resolver,
        speech: SpeechRequest,
        *,
        handshake: RequestState,
        request_id: str,
        continuation: Continuation,
        live_texts: LiveTexts | None = None,
    ) -> None:
        """`speech` contains all fields of the request except the text. If `live_texts` is set, a turn is spoken while
        the client writes it, and its ID is `request_id` plus its number. Otherwise, a turn is spoken once it is
        complete, and its ID is `request_id`. The turns continue the speech of `continuation`.
        """
        self._resolver, self._speech = resolver, speech
        self._info, self._delivery = speech.info, speech.delivery
        self._rules = rules_of(speech.spoken, speech.info)
        self._body = speech.body.model_copy(update={"previous_request_id": None})  # for turns that have yet to start
        self._handshake, self._request_id = handshake, request_id
        self._continuation, self._live_texts = continuation, live_texts
        self._turns: deque[Turn] = deque()  # in speaking order
        self._over: deque[Turn] = deque(maxlen=_MOST_TURNS)  # spoken since the last `clear`
        # A closed session does not accept text. An ended session does not speak text that is appended.
        self._num_turns, self._is_closed, self.has_ended = 0, False, False
        self._changed, self._events = asyncio.Event(), asyncio.Queue[Event](_MOST_UNSENT)
        self._rendering = self._delivery.rendering(self._info)
        self._speaking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._speaking = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        has_left = kind is not None and issubclass(kind, WebSocketDisconnect | RuntimeError)
        await self.aclose("client left" if has_left else "cancelled")

    @property
    def is_speaking(self) -> bool:
        """Whether any complete turns have yet to be spoken, or any events are unread."""
        return any(turn.is_complete for turn in self._turns) or not self._events.empty()

    @property
    def is_writing(self) -> bool:
        """Whether the last turn still accepts text."""
        return bool(self._turns) and self._turns[-1].takes_text

    def append(self, text: str) -> None:
        """Append text to the current or a new turn. Raises InvalidRequest if too much text is waiting."""
        if not text:
            return
        if sum(len(turn.text) - turn.num_taken for turn in self._turns) + len(text) > MAX_UNSPOKEN_CHARS:
            message = f"More than {MAX_UNSPOKEN_CHARS} characters wait to be spoken. Send more text later."
            raise InvalidRequest(message, "text", "string_above_max_length")
        turn = self._turns[-1] if self.is_writing else self._open_turn()
        text, turn.half = whole_characters(turn.half + text)
        turn.text += text
        turn.write()

    def flush(self) -> Turn:
        """End the current turn, or an empty new one. A `Flushed` event for the turn follows."""
        turn = self._turns[-1] if self.is_writing else self._open_turn()
        turn.is_complete, turn.text, turn.half = True, turn.text + repair_surrogates(turn.half), ""
        turn.write()
        return turn

    def configure(self, *, speed: float) -> None:
        """Change the speed of turns that have not started."""
        self._body = self._body.model_copy(update={"speed": speed})

    async def clear(self, played_s: float | None = None) -> Cleared:
        """Stop speaking and drop the waiting turns. Return the `Cleared` event, after which no events of these turns
        follow.

        `played_s` is how many seconds of audio the listener has heard since the session began or the last `clear`.
        """
        before = self._drop_events()
        await self._stop()
        before += self._drop_events()
        cleared = Cleared(tuple(self._turns), *self._at_playback(played_s))
        for turn in cleared.turns:
            self._end(turn, "cancelled")
        self._turns.clear()
        self._over.clear()
        self._continuation.break_off()
        self.has_ended = False
        for event in (*before, cleared):
            await self._events.put(event)
        self._rendering = self._delivery.rendering(self._info)
        self._speaking = asyncio.create_task(self._run())
        return cleared

    def close(self) -> None:
        """Close the session to new text. A `Done` event follows once all earlier text has been spoken."""
        if self.is_writing:
            self.flush()
        self._is_closed = True
        self._changed.set()

    async def aclose(self, outcome: str = "cancelled") -> None:
        """Cancel all speech immediately. `outcome` is for the log."""
        await self._stop()
        for turn in self._turns:
            self._end(turn, outcome)
        self._turns.clear()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events up to `Done` or `Failed`."""
        event: Event | None = None
        while not isinstance(event, Done | Failed):
            event = await self._events.get()
            yield event

    def _open_turn(self) -> Turn:
        if len(self._turns) >= _MOST_TURNS:
            raise InvalidRequest(f"{_MOST_TURNS} turns are already waiting. Send more later.", "text", "too_many_turns")
        self._num_turns += 1
        own_id = f"{self._request_id}-{self._num_turns}" if self._live_texts else self._request_id
        turn = Turn(self._num_turns, self._handshake.record.another(own_id))
        self._turns.append(turn)
        self._changed.set()
        return turn

    async def _run(self) -> None:
        try:
            while (turn := await self._next_turn()) is not None:
                await self._speak(turn)
                self._over.append(replace(self._turns.popleft(), utterance=None, live=None))  # saves memory
                self._end(turn)
                if turn.utterance is not None:
                    self._continuation.count(turn.utterance.synthesis)
                await self._events.put(Flushed(turn))
            self.has_ended = True
            if not self._delivery.files and (rest := await self._rendering.close()):
                await self._events.put(Rest(rest))
            cut = [turn.finish_reason for turn in self._over if turn.finish_reason is not FinishReason.STOP]
            last = self._over[-1].usage if self._over else Usage()
            last.left_out = sum((turn.usage.left_out for turn in self._over), Counter())
            await self._events.put(Done(cut[0] if cut else FinishReason.STOP, last.answer))
        except Exception as error:
            self.has_ended = True
            if self._turns:
                self._end(self._turns.popleft(), translate(error).code)
            await self._events.put(Failed(error))

    async def _next_turn(self) -> Turn | None:
        """Wait for the next turn. Return None if the session is closed and every turn has been spoken."""
        while not self._turns and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        return self._turns[0] if self._turns else None

    async def _speak(self, turn: Turn) -> None:
        has_begun = False
        self._rendering.set_speed(speed=self._body.speed)
        turn.start_s = self._rendering.samples / self._delivery.rate(self._info)
        async with aclosing(self._chunks(turn)) as chunks:
            async for chunk in chunks:
                turn.usage.add(chunk)
                self._continuation.deliver(chunk.num_samples / self._info.sample_rate / self._body.speed)
                audio = await self._rendering.feed(chunk.pcm)
                if not has_begun and chunk.pcm:
                    has_begun = True
                    await self._events.put(Started(turn))
                if turn.times is not None:
                    turn.times.feed(chunk)
                    if words := turn.times.take():
                        await self._events.put(Words(turn, tuple(words)))
                await self._send(turn, audio)
        if not has_begun:
            await self._events.put(Started(turn))
        rest = await (self._rendering.close() if self._delivery.files else self._rendering.drain())
        if self._delivery.files:
            self._rendering = self._delivery.rendering(self._info)
        await self._send(turn, rest)

    async def _chunks(self, turn: Turn) -> AsyncGenerator[PcmChunk, None]:
        """Yield a turn's audio, or a short silence if its text does not contain any words."""
        has_spoken = False
        is_there = turn.is_complete and len(turn.text) <= self._resolver.settings.max_input_chars
        texts = None if is_there else self._live_texts
        async with self._whole(turn) if texts is None else self._live(turn, texts) as utterance:
            if utterance is not None:
                async with aclosing(self._resolver.models.of(utterance).speak(utterance, self._info)) as chunks:
                    async for chunk in chunks:
                        has_spoken = has_spoken or bool(chunk.pcm)
                        yield chunk
        if not has_spoken and turn.text.strip():
            if (error := unspoken_script(turn.text[:_SCRIPT_CHARS], self._info, self._speech.voice.name)) is not None:
                turn.record.error = error.code
                await self._events.put(error)
            yield silence(self._info)

    @asynccontextmanager
    async def _whole(self, turn: Turn) -> AsyncIterator[Utterance | None]:
        """Wait for the complete text of a turn. Yield its utterance, or None if the text does not contain words."""
        while not turn.is_complete:
            turn.changed.clear()
            await turn.changed.wait()
        text = turn.take()
        # Check the length first, because long texts take long to convert.
        check_length("input", text, self._resolver.settings)
        spoken = read(text, self._rules, field="text")
        turn.usage.left_out = spoken.left_out
        if self._live_texts is not None and not is_speakable(spoken.text):
            yield None  # an empty text is not an error in a conversation
            return
        speech = await self._speech_for(self._body.model_copy(update={"input": text}), spoken)
        utterance = await self._utterance(turn, speech)
        turn.utterance = utterance.changed(tail=self._continuation.tail(utterance.synthesis))
        self._follow(turn, spoken)
        yield turn.utterance if is_speakable(turn.utterance.synthesis.text) else None

    @asynccontextmanager
    async def _live(self, turn: Turn, texts: LiveTexts) -> AsyncIterator[Utterance | None]:
        """Yield the utterance of a turn whose text is still arriving, or None if the text ends without words."""
        speech = await self._speech_for(self._body, read("", self._rules))
        utterance = await self._utterance(turn, speech, live=True)
        restyle = partial(in_style, self._resolver.voices, speech, base=utterance.synthesis)
        asked = texts.open(utterance, self._info, max_chars=MAX_UNSPOKEN_CHARS, rules=self._rules, restyle=restyle)
        with await asked as live:
            turn.live, turn.usage.left_out = live, live.left_out
            self._follow(turn, live)
            turn.write()
            if has_words := await live.wait_for_words():
                if foreign_language(turn.text[:_SCRIPT_CHARS], self._info.languages):  # perhaps only a name
                    await live.wait_for_first_text()
                    if not self._body.any_language and language_name(self._body.language) in (AUTO, DETECT):
                        check_language(turn.text[:_SCRIPT_CHARS], self._info, self._speech.voice.name)
                turn.utterance = await live.going_on(self._continuation)
            yield turn.utterance if has_words else None

    async def _speech_for(self, body: SpeechBody, spoken: SpokenText) -> SpeechRequest:
        self._handshake.caller.count_request()
        # A turn may start an hour after the request. Its voice may then have a new version, or may be deleted.
        voice = await self._resolver.choose_voice(self._speech.voice.name, body, self._info)
        return replace(self._speech, body=body, spoken=spoken, voice=voice)

    async def _utterance(self, turn: Turn, speech: SpeechRequest, *, live: bool = False) -> Utterance:
        identity = {"request_id": turn.record.request_id, "client": self._handshake.caller.name}
        utterance = await build_utterance(self._resolver, speech, live=live, **identity)
        turn.record.note_speech(utterance, self._info, stored=speech.voice.stored, speed=speech.body.speed)
        return start_marks(utterance, turn.record.received_ns)

    def _follow(self, turn: Turn, text: LiveText | SpokenText) -> None:
        if self._speech.word_times:
            turn.times = WordTimes(text, self._info, speed=self._body.speed)

    async def _send(self, turn: Turn, audio: bytes) -> None:
        for start in range(0, len(audio), MAX_AUDIO_BYTES):
            await self._events.put(Audio(turn, audio[start : start + MAX_AUDIO_BYTES]))

    async def _stop(self) -> None:
        if (task := self._speaking) is None:
            return
        if not task.cancelling():  # a second cancellation would interrupt the cleanup
            task.cancel()
            task.add_done_callback(self._stopped)  # even if the waiting task is cancelled
        await asyncio.wait((task,))

    def _stopped(self, task: asyncio.Task[None]) -> None:
        if self._speaking is task:
            self._speaking = None  # the task's error refers to frames that keep the session and its text in memory

    def _at_playback(self, played_s: float | None) -> tuple[Turn | None, Spoken | None]:
        """Return the turn at this position in the session's audio, or the first turn, and the text heard from it."""
        turns = [*self._over, *self._turns]
        if played_s is None or not turns:
            return next(iter(self._turns), turns[-1] if turns else None), None
        heard = next((one for one in reversed(turns) if one.start_s is not None and one.start_s <= played_s), turns[0])
        return heard, heard.spoken(played_s)

    def _drop_events(self) -> list[Cleared]:
        """Drop all unread events, but return those from earlier `clear` calls."""
        return [event for _ in range(self._events.qsize()) if isinstance(event := self._events.get_nowait(), Cleared)]

    def _end(self, turn: Turn, outcome: str | None = None) -> None:
        turn.record.error, turn.record.characters = outcome or turn.record.error, len(turn.text)
        turn.record.publish()
