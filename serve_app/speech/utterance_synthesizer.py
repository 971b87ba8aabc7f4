"""Synthesis of an utterance, with one call per text segment and no gaps between segments."""

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Protocol

from deployments.listener import Listener, ReaderTimeout
from deployments.protocol import FinishReason, ModelInfo, PcmChunk, SynthesisRequest
from serve_app.speech.look_ahead import LookAhead, SegmentAudio
from serve_app.speech.segments import Segments, Utterance
from serve_app.speech.utterance_assembler import UtteranceAssembler


class Synthesizer(Protocol):
    """Synthesizer for a loaded checkpoint: `ReplicaSynthesizer`, which depends on Ray, or a fake in tests."""

    async def describe(self) -> ModelInfo:
        """Describe the loaded checkpoint. Raises NotReady while the replicas are loading."""
        ...

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """Yield the audio of one segment as it is generated. Closing the generator cancels all of its calls.

        `info` is the result of `describe` for the request's model. Raises InvalidRequest, Overloaded, NotReady,
        ReplicaLost or EngineError at any point.
        """
        ...


class UtteranceSynthesizer:
    """Synthesizer of utterances of any length. The wrapped synthesizer accepts at most `max_segment_chars` per text."""

    def __init__(self, synthesizer: Synthesizer) -> None:
        self._synthesizer = synthesizer

    async def start_utterance(
        self, utterance: Utterance, info: ModelInfo, listener: Listener, *, calls: AsyncExitStack
    ) -> "StartedSpeech":
        """Begin one utterance and read its audio up to the first samples. If the speech ends badly at that point, start
        over once with another seed for all segments.

        `listener`: see `speak_utterance`. `calls` closes all calls that this method makes.
        """
        started = StartedSpeech(
            await calls.enter_async_context(aclosing(self.speak_utterance(utterance, info, listener)))
        )
        await started.read_start()
        if (second := utterance.redraw(started.reason, is_silent=started.is_silent)) is None:
            return started
        chunks = await calls.enter_async_context(aclosing(self.speak_utterance(second, info, listener)))
        started = StartedSpeech(chunks, seed=second.synthesis.seed)
        await started.read_start()
        return started

    def speak_utterance(
        self, utterance: Utterance, info: ModelInfo, listener: Listener
    ) -> AsyncGenerator[PcmChunk, None]:
        """Yield the audio of one utterance, with one call per text segment. If a client that is still writing the text
        pauses, the audio pauses too.

        Later segments are prefetched until `listener` needs their audio. The caller reports sent audio to `listener`.
        """
        if (live := utterance.live_text) is not None:
            chunks = self.speak_segments(utterance.synthesis, live, info, listener, may_redraw=utterance.may_redraw)
            return live.smoothed(chunks, info.sample_rate, listener)
        segments = Segments.of(utterance, info.max_segment_chars)
        first = segments.known_segment(0)
        assert first is not None, "a text has a segment"
        if segments.is_single and not (first.word_times or first.continues):
            return self._synthesizer.synthesize(first, info)
        return self.speak_segments(first, segments, info, listener, may_redraw=utterance.may_redraw)

    async def speak_segments(
        self, first: SynthesisRequest, segments: Segments, info: ModelInfo, listener: Listener, *, may_redraw: bool
    ) -> AsyncGenerator[PcmChunk, None]:
        """Yield the audio of all segments in order. `first` is the request for the first segment, with the utterance's
        own tail and seed. The next segment is requested once it is known and the current segment has audio. A joined
        segment is requested after the current segment has ended.

        Sampling options apply to each segment separately: `max_new_tokens` limits one segment, not the utterance. If
        `may_redraw` is set, speech that ends badly with its first audio stops there, because the caller redraws it.
        Segments after the first audio are redrawn here.
        """
        assembler = UtteranceAssembler(info)
        number = 0  # of the current segment

        def open_segment(request: SynthesisRequest) -> SegmentAudio:
            segment = Utterance(request, may_redraw=may_redraw)
            return SegmentAudio(segment, partial(self._synthesizer.synthesize, info=info))

        look_ahead = LookAhead(segments, open_segment)
        async with look_ahead, ReaderTimeout(look_ahead.cancel_next) as reader:
            look_ahead.request_segment(first)
            if pause_s := segments.pause_s(0):
                yield assembler.silence(pause_s)
            while (segment := look_ahead.pop()) is not None:
                assembler.start_segment(number, segments.start(number), speed=segments.speed(number))
                if may_redraw and assembler.has_audio and await segment.read_ahead(listener.due_s):
                    segments.close_segment(number)
                while (chunk := await reader.read(segment.next)) is not None:
                    has_failed = may_redraw and assembler.has_failed(chunk)
                    part = await assembler.add(chunk, is_last=segments.is_last(number))
                    if has_failed:
                        yield chunk
                        return
                    look_ahead.request_after(number, segment, chunk)
                    yield part
                segments.close_segment(number)
                number += 1
                await look_ahead.ensure_requested(number, segment)
                if pause_s := segments.pause_s(number):
                    yield assembler.silence(pause_s)
            if not assembler.has_ended:  # the end was not yet known when the last chunk arrived
                yield assembler.end()


class StartedSpeech:
    """Speech that has been read up to its first samples. `next` returns all chunks, including those already read."""

    def __init__(self, chunks: AsyncGenerator[PcmChunk, None], *, seed: int | None = None) -> None:
        """Wrap `chunks`. `seed` is set in the first chunks if it differs from the request's seed."""
        self._chunks, self._seed = chunks, seed
        self._start: deque[PcmChunk] = deque()

    @property
    def is_silent(self) -> bool:
        """Whether the speech ended before any samples."""
        return bool(self._start) and not self._start[-1].pcm

    @property
    def reason(self) -> FinishReason | None:
        return self._start[-1].finish_reason if self._start else None

    async def read_start(self) -> None:
        while not (self._start and self._start[-1].pcm) and (chunk := await anext(self._chunks, None)) is not None:
            self._start.append(chunk if self._seed is None else replace(chunk, seed=self._seed))

    async def next(self) -> PcmChunk | None:
        return self._start.popleft() if self._start else await anext(self._chunks, None)
