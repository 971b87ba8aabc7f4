"""Admission: a synthesizer that refuses a request whose audio would come late, and that measures the audio it sends.

`room.py` says who is let in, `speech_start.py` begins speech and waits for its first audio.
"""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack

import numpy as np

from deployments.audio.speech_detection import FirstSound
from deployments.listener import Listener, ReaderWatch
from deployments.protocol import FinishReason, ModelInfo, PcmChunk
from deployments.serving import metrics
from serve_app.config import AdmissionSettings
from serve_app.speech.characters import is_speakable
from serve_app.speech.joints import SpokenEnd, Tails
from serve_app.speech.live_text import LiveText
from serve_app.speech.model_state import ModelState, ready
from serve_app.speech.room import Room
from serve_app.speech.segments import UtteranceRequest
from serve_app.speech.speech_start import SpeechStart
from serve_app.speech.synthesizer import Synthesizer, silence


def always() -> bool:
    """The `is_running` of a pool that always has replicas."""
    return True


class _Client:
    """The client of one stream. A pause is its own where it is slow to read the audio or to write the text."""

    def __init__(self, sample_rate: int, live: LiveText | None, *, came_s: float) -> None:
        self.came_s = came_s
        self.listener = Listener()
        self.sound = FirstSound(sample_rate)
        self.reason: FinishReason | None = None  # of the latest chunk
        self.was_slow = False  # to take the latest chunk
        self._sample_rate, self._live = sample_rate, live
        self._was_writing, self._given_s = False, came_s

    def audio_s(self, chunk: PcmChunk) -> float:
        return chunk.num_samples / self._sample_rate

    def excuse(self) -> None:
        """No chunk is late that had to wait for the client."""
        is_writing = self._live is not None and not self._live.is_over
        if self.was_slow or self._was_writing or is_writing:
            self.listener.wait(now_s=time.monotonic())
        self._was_writing = is_writing

    def give(self, chunk: PcmChunk) -> None:
        self.reason, self._given_s = chunk.finish_reason, time.monotonic()

    def ask(self) -> None:
        """The client wants the next chunk."""
        self.listener.pause(time.monotonic() - self._given_s)


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
        self.state, self._model, self._max_late_s = state, model, settings.max_late_s
        self.room = Room(settings, is_running=is_running, state=state, model=model)
        self._start = SpeechStart(synthesizer, self.room)

    async def describe(self) -> ModelInfo:
        return await self._synthesizer.describe()

    async def admit(self, request: UtteranceRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """The audio of one utterance. The stream is let in or refused, and what is sent is measured.

        A text with nothing to speak is answered by a moment of silence.
        Raises Overloaded if the audio would come late, NotReady while no talker has started.
        """
        if request.writing is None and not is_speakable(request.text):
            yield silence(info)
            return
        room = self.room
        if not request.is_underway:
            room.check(request.client)
        came_s, live = time.monotonic(), request.writing
        is_speaking, end = False, SpokenEnd()
        client = _Client(info.sample_rate, live, came_s=came_s)
        room.enter()
        try:
            async with AsyncExitStack() as opened, ReaderWatch(room.leave_place, room.come_back) as reader:
                speech = await self._start.await_first_audio(request, info, opened)
                is_speaking = True
                room.begin_speaking()
                while (chunk := await speech.next()) is not None:
                    self._measure(chunk, client)
                    end.add(chunk)
                    client.give(chunk)
                    reader.before_yield()
                    yield chunk
                    client.ask()
                    client.was_slow = await reader.after_yield()
            spoken_s, audio_s = time.monotonic() - came_s, client.listener.audio_s
            metrics.finished(spoken_s, audio_s=audio_s, reason=client.reason, model=self._model)
            if self._tails is not None:
                self._tails.keep(request, end.tail(request.text if live is None else live.spoken))
        finally:
            if client.listener.has_begun:
                metrics.stalled(client.listener.stalled_s, model=self._model)
            room.leave(was_speaking=is_speaking)

    def _measure(self, chunk: PcmChunk, client: _Client) -> None:
        """Count a chunk that is sent now."""
        client.excuse()
        if not chunk.pcm:
            return
        self.room.hear()
        self._judge(client, client.audio_s(chunk))
        if (onset_s := client.sound.feed(np.frombuffer(chunk.pcm, "<i2"))) is not None:
            metrics.ttfa(time.monotonic() - client.came_s, onset_s=onset_s, model=self._model)

    def _judge(self, client: _Client, audio_s: float) -> None:
        """Whether audio comes in time. It is late once the listener's pauses add up to more than `max_late_s`."""
        listener, now_s = client.listener, time.monotonic()
        is_first = not listener.has_begun
        late_s = listener.deliver(audio_s, now_s=now_s)
        metrics.audio(audio_s, late_s=late_s, model=self._model)
        if is_first:
            metrics.ttfp(now_s - client.came_s, model=self._model)
            return
        is_late = late_s > 0 and listener.stalled_s > self._max_late_s
        self.room.delivered(late=is_late)
