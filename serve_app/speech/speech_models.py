"""Synthesis with all models: rejects utterances whose audio would be late, and measures the audio.

`admission_control.py` admits requests. This module enforces the time limit for first audio.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

import numpy as np

from deployments.errors import NotReady, Overloaded
from deployments.listener import Listener, ReaderTimeout
from deployments.protocol import SAMPLE_BYTES, FinishReason, ModelInfo, PcmChunk
from deployments.serving import metrics
from deployments.speech_detection import FirstSound
from serve_app.config import AdmissionSettings
from serve_app.speech.admission_control import AdmissionControl
from serve_app.speech.model_state import ModelState, ready
from serve_app.speech.observers import Observe, Observers
from serve_app.speech.segments import LiveSegments, Utterance
from serve_app.speech.utterance_synthesizer import Synthesizer, UtteranceSynthesizer
from serve_app.text.characters import is_speakable

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0  # how often to log startup progress while a request waits for it
# Length of the audio for a text with nothing to speak, because clients treat a response without audio as a failure.
SILENCE_S = 0.1


def always() -> bool:
    """Implement `is_running` for a pool that always has replicas."""
    return True


def silence(info: ModelInfo) -> PcmChunk:
    """Return SILENCE_S seconds of silence as an utterance's complete audio."""
    codes = np.zeros((0, info.num_code_groups), np.int16)
    pcm = bytes(int(SILENCE_S * info.sample_rate) * SAMPLE_BYTES)
    return PcmChunk(pcm, codes, num_text_tokens=0, finish_reason=FinishReason.STOP)


class SpeechModel:
    """Synthesis with one model. Limits the streams in this process and their wait for first audio, and measures the
    audio.

    `is_running` returns false for a pool that is scaled to zero and must first start a replica. `state` returns the
    progress of that start. `model` is the model's name, or empty if there is only one.
    """

    def __init__(
        self,
        synthesizer: Synthesizer,
        settings: AdmissionSettings,
        *,
        is_running: Callable[[], bool] = always,
        state: Callable[[], ModelState] = ready,
        model: str = "",
    ) -> None:
        self._synthesizer = synthesizer
        self.observe: dict[str, Observe] = {}  # called for each utterance, by extension name
        self.admission = AdmissionControl(settings, is_running=is_running, state=state, model=model)
        self._utterances = UtteranceSynthesizer(synthesizer)

    async def describe(self) -> ModelInfo:
        return await self._synthesizer.describe()

    async def speak(self, utterance: Utterance, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """Yield the audio of one utterance if admission control admits it.

        Text with nothing to speak yields a moment of silence. Raises Overloaded if the audio would be late, and
        NotReady while no talker has started.
        """
        request, live, admission = utterance.synthesis, utterance.live_text, self.admission
        if live is None and not is_speakable(request.text):
            yield silence(info)
            return
        if not request.is_continuation:
            admission.check(request.client)
        observers, listener = Observers(self.observe, utterance, info), Listener()
        with StreamMeter(admission, info.sample_rate, listener, live=live) as meter:
            async with (
                AsyncExitStack() as calls,
                ReaderTimeout(admission.release_place, admission.reacquire_place) as reader,
            ):
                async with _start_limit(admission, utterance):
                    started = await self._utterances.start_utterance(utterance, info, listener, calls=calls)
                meter.begin_speaking()
                while (chunk := await reader.read(started.next)) is not None:
                    observers.feed(chunk)
                    meter.begin_send(chunk, was_paused=reader.was_paused)
                    yield chunk
                    meter.end_send()
            meter.finish()
        observers.end()


class SpeechModels:
    """All models of this process, by name. The first is the default. If there is only one, its name is empty."""

    def __init__(self, models: Mapping[str, SpeechModel]) -> None:
        self._models = models

    def add_observer(self, extension: str, observe: Observe) -> None:
        """Call `observe` for each utterance of all models."""
        for model in self._models.values():
            model.observe[extension] = observe

    async def describe(self) -> ModelInfo:
        """Describe the default model. Raises NotReady."""
        return await next(iter(self._models.values())).describe()

    async def infos(self) -> Sequence[ModelInfo]:
        """Describe every available model, starting with the default. Raises NotReady if none is available."""
        if len(self._models) == 1:
            return [await self.describe()]
        calls = [model.describe() for model in self._models.values()]
        results = await asyncio.gather(*calls, return_exceptions=True)
        infos = [each for each in results if isinstance(each, ModelInfo)]
        failed = [each for each in results if isinstance(each, BaseException) and not isinstance(each, NotReady)]
        if failed or not infos:
            raise failed[0] if failed else NotReady("no model can be described yet")
        return infos

    def __len__(self) -> int:
        return len(self._models)

    def of(self, utterance: Utterance) -> SpeechModel:
        return self._models[utterance.synthesis.model]

    def check_room(self, client: str) -> None:
        """Raise Overloaded or NotReady if every model would reject a request from this client now.

        This counts one rejection, for the default model. If any model would admit the request, none is counted.
        """
        if all(model.admission.refusal_reason(client) for model in self._models.values()):
            next(iter(self._models.values())).admission.check(client)

    def stream_counts(self) -> tuple[int, int, int]:
        """Return stream counts over all models of this process: playing, waiting for first audio, and the maximum
        allowed.
        """
        admissions = [model.admission for model in self._models.values()]
        speaking = sum(admission.num_speaking for admission in admissions)
        streams = sum(admission.num_streams for admission in admissions)
        return speaking, streams - speaking, sum(admission.settings.max_streams for admission in admissions)

    def states(self) -> dict[str, ModelState]:
        """Return the state of each model, by name."""
        return {name: model.admission.state() for name, model in self._models.items()}


class StreamMeter:
    """Tracks one stream for admission control, and compares the arrival of its audio with playback time.

    A chunk does not count as late if the client was slow to read the previous audio or to write its text.
    """

    def __init__(
        self, admission: AdmissionControl, sample_rate: int, listener: Listener, *, live: LiveSegments | None
    ) -> None:
        self._admission, self._sample_rate, self._listener, self._live = admission, sample_rate, listener, live
        self._came_s = time.monotonic()
        self._sent_s = self._came_s  # time when the latest chunk was sent
        self._sound = FirstSound(sample_rate)
        self._reason: FinishReason | None = None  # finish reason of the latest chunk
        self._is_speaking = False  # whether the first audio has arrived
        self._was_writing = False  # whether the client was writing when the latest chunk was sent

    def __enter__(self) -> Self:
        self._admission.add_stream()
        return self

    def __exit__(self, *error: object) -> None:
        if self._listener.has_begun:
            metrics.STALLS.record(self._listener.stalled_s, model=self._admission.model)
        self._admission.remove_stream(was_speaking=self._is_speaking)

    def begin_speaking(self) -> None:
        """Record that the first audio has arrived."""
        self._is_speaking = True
        self._admission.begin_speaking()

    def begin_send(self, chunk: PcmChunk, *, was_paused: bool) -> None:
        """Measure a chunk that is about to be sent. `was_paused`: the client read the previous chunk so late that the
        stream was no longer counted.
        """
        is_writing = self._live is not None and not self._live.is_text_complete
        if was_paused or self._was_writing or is_writing:
            self._listener.reset_due(now_s=time.monotonic())
        self._was_writing = is_writing
        if chunk.pcm:
            self._measure(chunk)
        self._reason = chunk.finish_reason
        self._sent_s = time.monotonic()

    def end_send(self) -> None:
        """Record that the client has read the latest chunk."""
        self._listener.postpone(time.monotonic() - self._sent_s)

    def finish(self) -> None:
        """Record the stream's totals after all chunks have been sent."""
        spoken_s = time.monotonic() - self._came_s
        metrics.record_stream(
            spoken_s, audio_s=self._listener.audio_s, reason=self._reason, model=self._admission.model
        )

    def _measure(self, chunk: PcmChunk) -> None:
        """Measure one chunk. If the stream's stalls exceed `max_late_s`, admission control counts a late chunk."""
        admission, listener = self._admission, self._listener
        now_s = time.monotonic()
        admission.count_audio()
        is_first = not listener.has_begun
        audio_s = chunk.num_samples / self._sample_rate
        late_s = listener.deliver(audio_s, now_s=now_s)
        metrics.record_chunk(audio_s, late_s=late_s, model=admission.model)
        if is_first:
            metrics.TTFP.record(now_s - self._came_s, model=admission.model)
        else:
            admission.count_chunk(late=late_s > 0 and listener.stalled_s > admission.settings.max_late_s)
        if (onset_s := self._sound.feed(np.frombuffer(chunk.pcm, "<i2"))) is not None:
            metrics.TTFA.record(time.monotonic() - self._came_s, model=admission.model)
            metrics.ONSET.record(onset_s, model=admission.model)


@asynccontextmanager
async def _start_limit(admission: AdmissionControl, utterance: Utterance) -> AsyncIterator[None]:
    """Limit the wait for first audio within this context, and count the request in admission control's queue.

    Raises Overloaded, or NotReady if no replica was running.
    """
    request, live = utterance.synthesis, utterance.live_text
    is_starting = not admission.is_running()
    is_in_line = request.reference is None and not is_starting
    limit_s = admission.settings.start_wait_s if is_starting else admission.settings.max_wait_s
    ticket = object()
    came_s = time.monotonic()

    def join_line() -> None:
        if is_in_line:
            admission.join_line(ticket, request.client)

    try:
        async with _timeout(limit_s, live, join_line), _log_start(admission, request.request_id, is_starting):
            yield
    except Overloaded:
        metrics.REFUSALS.record(1, reason="stage", model=admission.model)
        raise
    except TimeoutError:
        raise admission.refusal("late" if admission.has_run_since(came_s) else "starting") from None
    finally:
        admission.leave_line(ticket)
    if is_in_line:
        admission.count_start(time.monotonic() - came_s if live is None else None)


@asynccontextmanager
async def _timeout(limit_s: float, live: LiveSegments | None, on_start: Callable[[], None]) -> AsyncIterator[None]:
    """Raise TimeoutError if the context takes longer than `limit_s` seconds.

    Timing starts immediately or, for a `live` text, as soon as the client has written enough text to speak. `on_start`
    is called at that moment.
    """
    if live is None:
        on_start()
        async with asyncio.timeout(limit_s):
            yield
        return
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:

        async def start_once_written() -> None:
            await live.wait_for_first_text()
            timeout.reschedule(loop.time() + limit_s)
            on_start()

        starting = asyncio.create_task(start_once_written())
        try:
            yield
        finally:
            starting.cancel()


@asynccontextmanager
async def _log_start(admission: AdmissionControl, request_id: str, is_starting: bool) -> AsyncIterator[None]:
    """Log the model's startup progress every _LOG_EVERY_S seconds while it `is_starting`."""

    async def log() -> None:
        while not admission.is_running():
            logger.info("request %s waits for %s: %s", request_id, admission.model or "the model", admission.state())
            await asyncio.sleep(_LOG_EVERY_S)

    logging_task = asyncio.create_task(log()) if is_starting else None
    try:
        yield
    finally:
        if logging_task is not None:
            logging_task.cancel()
