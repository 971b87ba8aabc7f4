"""Synthesize one segment of a job as background work. If the speech is faulty, try another seed."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np

from deployments.errors import EngineError, TalkrayError
from deployments.listener import Listener
from deployments.protocol import Codes, ModelInfo, Reference
from serve_app.api.access.callers import VISITOR, Visitor
from serve_app.api.request_record import RequestRecord, Usage
from serve_app.extensions.jobs.job_store import packed
from serve_app.extensions.jobs.stored_job import JobPlan, MadeSegment, Manner, Part, SegmentId, StoredJob
from serve_app.extensions.voices.library import Voices
from serve_app.speech.segments import SECOND_ATTEMPT, Utterance, segment_seed
from serve_app.speech.utterance_synthesizer import Synthesizer, UtteranceSynthesizer


class JobStopped(TalkrayError):
    """Raised if a job cannot continue as planned. The message says how to fix the problem."""


@dataclass(slots=True)
class _Speech:
    """Codes, audio and usage from one attempt to synthesize a segment."""

    usage: Usage
    codes: list[Codes] = field(default_factory=list)
    pcm: bytearray = field(default_factory=bytearray)
    positions: list[tuple[float, float]] = field(default_factory=list)
    began_ns: int = field(default_factory=time.time_ns)


class SegmentMaker:
    """Synthesizes each segment with its model's synthesizer, bypassing admission control."""

    def __init__(
        self, synthesizers: Mapping[str, Synthesizer], voices: Voices, on_end: Callable[[RequestRecord], None]
    ) -> None:
        """`synthesizers` maps `SynthesisRequest.model` to its synthesizer. `on_end` takes each segment's record."""
        self._synthesizers, self._voices, self._on_end = synthesizers, voices, on_end

    async def make(self, job: StoredJob, plan: JobPlan, segment_id: SegmentId) -> tuple[MadeSegment, bytes]:
        """Synthesize a segment. Return the arguments for `JobStore.save`. Raises JobStopped and synthesizer errors."""
        part = plan.part(segment_id.part)
        manner = plan.manners[part.manner]
        info = job.info(manner.model)
        await self._check(job, manner, info)
        if (take := part.segments[segment_id.segment].take) is not None:
            manner = manner.model_copy(update={"style": take})
        reference = await self._reference(job, manner, info)
        utterance = plan.utterance(job, segment_id, reference)
        request, voice = utterance.synthesis, manner.stored_voice or utterance.synthesis.voice
        speech = await self._speak(utterance, info, voice)
        second = utterance.redraw(speech.usage.finish_reason, seed=segment_seed(request.seed, SECOND_ATTEMPT))
        if second is not None:
            speech = await self._speak(second, info, voice)
        RequestRecord(
            request.request_id,
            speech.began_ns,
            method="JOB",
            key=job.owner or None,
            dialect="Jobs",  # the name of this API in usage counts
            characters=len(request.text),
            samples_per_s=info.sample_rate,
            usage=speech.usage,
            on_end=self._on_end,
        ).end()
        return await asyncio.to_thread(_packed_segment, speech, part, segment_id, info, second is not None)

    async def _check(self, job: StoredJob, manner: Manner, info: ModelInfo) -> None:
        """Raise JobStopped if the loaded model has changed, because the job's voice would change too."""
        if manner.model not in self._synthesizers:
            raise JobStopped(f"the model {manner.model or info.name} is no longer served. Serve it, and resume the job")
        now = await self._synthesizers[manner.model].describe()
        if (now.name, now.fingerprint) != (info.name, info.fingerprint):
            raise JobStopped(f"the job's model {info.name} differs from {now.name}. Load that model, and resume")
        if job.deterministic and not now.deterministic:
            raise JobStopped("the job is deterministic, but its talkers are not. Set talker.deterministic, and resume")

    async def _reference(self, job: StoredJob, manner: Manner, info: ModelInfo) -> Reference | None:
        if manner.stored_voice is None:
            return None
        VISITOR.set(Visitor(job.owner, sees_all=True))  # the owner's rights were checked during planning
        voice = await self._voices.find(manner.stored_voice)
        if voice is None:
            raise JobStopped(f"the voice {manner.stored_voice} was deleted. Create a new job")
        return await self._voices.reference(voice, manner.style, info, x_vector_only=manner.x_vector_only)

    async def _speak(self, utterance: Utterance, info: ModelInfo, voice: str | None) -> _Speech:
        request = utterance.synthesis
        speech = _Speech(Usage(model=info.name, voice=voice, seed=request.seed))
        uncut = replace(info, max_segment_chars=max(info.max_segment_chars, len(request.text)))
        synthesizer = UtteranceSynthesizer(self._synthesizers[request.model])
        async with aclosing(synthesizer.speak_utterance(utterance, uncut, Listener.of(background=True))) as chunks:
            async for chunk in chunks:
                speech.codes.append(chunk.codes)
                speech.pcm += chunk.pcm
                speech.positions += chunk.text_positions
                speech.usage.add(chunk)
        if speech.usage.finish_reason is None:
            raise EngineError("the speech of a segment is incomplete: the stream ended without a finish reason")
        return speech


def _packed_segment(
    speech: _Speech, part: Part, segment_id: SegmentId, info: ModelInfo, was_redrawn: bool
) -> tuple[MadeSegment, bytes]:
    """Add the silence before the segment, and the silence after the last segment of a part. Blocks."""
    assert speech.usage.finish_reason is not None
    before = int(part.segments[segment_id.segment].pause_s * info.sample_rate)
    is_last = segment_id.segment == len(part.segments) - 1
    after = int(part.end_pause_s * info.sample_rate) if is_last else 0
    pcm = bytes(2 * before) + bytes(speech.pcm) + bytes(2 * after)
    positions = [(before / info.sample_rate + seconds, chars) for seconds, chars in speech.positions]
    made = MadeSegment(segment_id, len(pcm) // 2, finish_reason=speech.usage.finish_reason, was_redrawn=was_redrawn)
    return made, packed(np.concatenate(speech.codes), pcm, positions, info.sample_rate)
