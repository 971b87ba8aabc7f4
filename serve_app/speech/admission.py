"""Admission: speaks the utterances of one model, refuses those whose audio would come late, and measures what is sent.

`room.py` says who is let in. The first audio has to come within a time limit, and is asked for once more, with another
seed, if speech ends badly with it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import numpy as np

from deployments.audio.speech_detection import FirstSound
from deployments.errors import Overloaded
from deployments.listener import Listener, ReaderWatch
from deployments.protocol import FinishReason, ModelInfo, PcmChunk
from deployments.serving import metrics
from serve_app.config import AdmissionSettings
from serve_app.speech.joints import SpokenEnd, Tails
from serve_app.speech.live_text import LiveText
from serve_app.speech.long_text import LongText
from serve_app.speech.model_state import ModelState, ready
from serve_app.speech.redraw import ended_badly
from serve_app.speech.room import Room
from serve_app.speech.segments import UtteranceRequest
from serve_app.speech.synthesizer import Synthesizer, silence
from serve_app.text.characters import is_speakable

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0  # about a start that a request waits for


def always() -> bool:
    """The `is_running` of a pool that always has replicas."""
    return True


class _Client:
    """The client of one stream. A pause is its own where it is slow to read the audio or to write the text."""

    def __init__(self, sample_rate: int, live: LiveText | None) -> None:
        self.came_s = time.monotonic()
        self.listener = Listener()
        self.sound = FirstSound(sample_rate)
        self.reason: FinishReason | None = None  # of the latest chunk
        self.was_slow = False  # to take the latest chunk
        self._sample_rate, self._live = sample_rate, live
        self._was_writing = False
        self._given_s = self.came_s  # when the latest chunk was sent

    def audio_s(self, chunk: PcmChunk) -> float:
        return chunk.num_samples / self._sample_rate

    def excuse(self) -> None:
        """No chunk is late that had to wait for the client."""
        is_writing = self._live is not None and not self._live.is_taken_in
        if self.was_slow or self._was_writing or is_writing:
            self.listener.wait(now_s=time.monotonic())
        self._was_writing = is_writing

    def give(self, chunk: PcmChunk) -> None:
        self.reason = chunk.finish_reason
        self._given_s = time.monotonic()

    def ask(self) -> None:
        """The client wants the next chunk."""
        self.listener.postpone(time.monotonic() - self._given_s)


class PeekedSpeech:
    """Speech that was read as far as its first samples. `next` gives all of its chunks, these first."""

    def __init__(self, chunks: AsyncGenerator[PcmChunk, None], *, seed: int | None = None) -> None:
        """The chunks of the start get the `seed`, if it is not the request's."""
        self._chunks, self._seed = chunks, seed
        self._read: deque[PcmChunk] = deque()

    @property
    def has_failed(self) -> bool:
        """Whether chunks were read, and the last of them ended speech: before any samples, or badly."""
        return ended_badly(self.reason) or (bool(self._read) and not self._read[-1].pcm)

    @property
    def reason(self) -> FinishReason | None:
        return self._read[-1].finish_reason if self._read else None

    async def peek(self) -> None:
        """Read up to the first samples."""
        while not (self._read and self._read[-1].pcm) and (chunk := await anext(self._chunks, None)) is not None:
            self._read.append(chunk if self._seed is None else replace(chunk, seed=self._seed))

    async def next(self) -> PcmChunk | None:
        return self._read.popleft() if self._read else await anext(self._chunks, None)


class Admission:
    """Bounds the streams of one model at one ingress replica and their wait for first audio, and measures them.

    `is_running` says whether replicas run; a pool at zero first has to start one. `state` says how far that start is.
    `model` is the name of one of several models.
    """

    def __init__(
        self,
        synthesizer: Synthesizer,
        settings: AdmissionSettings,
        *,
        is_running: Callable[[], bool] = always,
        state: Callable[[], ModelState] = ready,
        model: str = "",
        tails: Tails | None = None,
    ) -> None:
        """`tails` keeps the ends of finished requests."""
        self._synthesizer, self._tails = synthesizer, tails
        self.room = Room(settings, is_running=is_running, state=state, model=model)
        self._long_text = LongText(synthesizer)

    async def describe(self) -> ModelInfo:
        return await self._synthesizer.describe()

    async def speak(self, utterance: UtteranceRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """The audio of one utterance, if there is room for its stream.

        A text with nothing to speak is answered by a moment of silence.
        Raises Overloaded if the audio would come late, NotReady while no talker has started.
        """
        request = utterance.synthesis
        live = utterance.live_text
        if live is None and not is_speakable(request.text):
            yield silence(info)
            return
        if not request.is_underway:
            self.room.check(request.client)
        client = _Client(info.sample_rate, live)
        end = SpokenEnd()
        is_speaking = False
        self.room.add_stream()
        try:
            async with AsyncExitStack() as opened, ReaderWatch(self.room.pause, self.room.resume) as reader:
                speech = await self._await_first_audio(utterance, info, opened)
                is_speaking = True
                self.room.begin_speaking()
                while (chunk := await speech.next()) is not None:
                    self._measure(chunk, client)
                    end.add(chunk)
                    client.give(chunk)
                    reader.before_yield()
                    yield chunk
                    client.ask()
                    client.was_slow = await reader.after_yield()
            spoken_s = time.monotonic() - client.came_s
            metrics.finished(spoken_s, audio_s=client.listener.audio_s, reason=client.reason, model=self.room.model)
            if self._tails is not None:
                self._tails.keep(request, end.tail(request.text if live is None else live.spoken))
        finally:
            if client.listener.has_begun:
                metrics.stalled(client.listener.stalled_s, model=self.room.model)
            self.room.remove_stream(was_speaking=is_speaking)

    async def _await_first_audio(
        self, utterance: UtteranceRequest, info: ModelInfo, opened: AsyncExitStack
    ) -> PeekedSpeech:
        """Speech whose first samples have come, which they have to within a time limit. `opened` closes its calls.

        Raises Overloaded, NotReady.
        """
        request = utterance.synthesis
        room = self.room
        settings = room.settings
        is_starting = not room.is_running()
        is_in_line = request.reference is None and not is_starting
        allowed_s = settings.start_wait_s if is_starting else settings.max_wait_s
        ticket = object()
        came_s = time.monotonic()

        def join_line() -> None:
            if is_in_line:
                room.join_line(ticket, request.client)

        try:
            async with (
                _limited(allowed_s, utterance.live_text, join_line),
                self._log_start(request.request_id, is_starting),
            ):
                speech = await self._until_audio(utterance, info, opened)
        except Overloaded:
            metrics.refused("stage", model=room.model)
            raise
        except TimeoutError:
            raise room.refusal("late" if room.has_run_since(came_s) else "starting") from None
        finally:
            room.leave_line(ticket)
        if is_in_line:
            room.count_start(time.monotonic() - came_s if utterance.live_text is None else None)
        return speech

    async def _until_audio(self, utterance: UtteranceRequest, info: ModelInfo, opened: AsyncExitStack) -> PeekedSpeech:
        """Speech with its first samples. What ends badly with them is made again, once, if the request allows it:
        nothing of it was sent.
        """

        async def peeked(utterance: UtteranceRequest, *, new_seed: int | None = None) -> PeekedSpeech:
            audio = await opened.enter_async_context(aclosing(self._long_text.speak(utterance, info)))
            speech = PeekedSpeech(audio, seed=new_seed)
            await speech.peek()
            return speech

        speech = await peeked(utterance)
        if not (utterance.redraws and speech.has_failed):
            return speech
        second = utterance.redrawn(speech.reason)
        return await peeked(second, new_seed=second.synthesis.seed)

    @asynccontextmanager
    async def _log_start(self, request_id: str, is_starting: bool) -> AsyncIterator[None]:
        """If the model `is_starting`, logs every _LOG_EVERY_S seconds how far its start is."""

        async def log() -> None:
            room = self.room
            while not room.is_running():
                logger.info("request %s waits for %s: %s", request_id, room.model or "the model", room.state())
                await asyncio.sleep(_LOG_EVERY_S)

        logging_it = asyncio.create_task(log()) if is_starting else None
        try:
            yield
        finally:
            if logging_it is not None:
                logging_it.cancel()

    def _measure(self, chunk: PcmChunk, client: _Client) -> None:
        """Count a chunk that is sent now. It is late if the listener's pauses add up to more than `max_late_s`."""
        client.excuse()
        if not chunk.pcm:
            return
        room = self.room
        listener = client.listener
        now_s = time.monotonic()
        room.count_audio()
        is_first = not listener.has_begun
        audio_s = client.audio_s(chunk)
        late_s = listener.deliver(audio_s, now_s=now_s)
        metrics.audio(audio_s, late_s=late_s, model=room.model)
        if is_first:
            metrics.ttfp(now_s - client.came_s, model=room.model)
        else:
            room.delivered(late=late_s > 0 and listener.stalled_s > room.settings.max_late_s)
        if (onset_s := client.sound.feed(np.frombuffer(chunk.pcm, "<i2"))) is not None:
            metrics.ttfa(time.monotonic() - client.came_s, onset_s=onset_s, model=room.model)


@asynccontextmanager
async def _limited(allowed_s: float, live: LiveText | None, on_start: Callable[[], None]) -> AsyncIterator[None]:
    """Raises TimeoutError if the block takes longer than `allowed_s` seconds.

    The time begins at once, or with a `live` text as soon as the client has written enough of it to be spoken. Then
    `on_start` is called.
    """
    if live is None:
        on_start()
        async with asyncio.timeout(allowed_s):
            yield
        return
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:

        async def start_once_written() -> None:
            await live.is_plenty()
            limit.reschedule(loop.time() + allowed_s)
            on_start()

        limiting = asyncio.create_task(start_once_written())
        try:
            yield
        finally:
            limiting.cancel()
