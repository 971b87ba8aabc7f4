"""The audio of finished segments, read from the store one at a time and encoded as it is
fetched, and when its words are heard.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from deployments.protocol import FinishReason, PcmChunk
from serve_app.client_audio.file_headers import wav_header
from serve_app.client_audio.formats import AudioFormat, open_encoder
from serve_app.jobs.job_store import JobStore
from serve_app.jobs.stored_job import MadeSegment
from serve_app.jobs.work import Json, Track
from serve_app.speech.segments import segment_start
from serve_app.speech.word_times import WordTimes

_LONGEST_WAV = 2**32 - 4096  # with its header


class StoredAudio:
    """The audio of one track in one format."""

    def __init__(self, store: JobStore, track: Track, audio_format: AudioFormat, *, disclosed: bool) -> None:
        """`disclosed` as in `open_encoder`."""
        self._store, self._track, self._format, self._disclosed = store, track, audio_format, disclosed
        self._pcm_bytes = 2 * sum(made.samples for made in track.made)

    @property
    def num_bytes(self) -> int | None:
        """Of the whole, where that is known before it is encoded: any part of it can then be read."""
        if self._format is AudioFormat.WAV:
            return len(self._wav_header()) + self._pcm_bytes if self._pcm_bytes <= _LONGEST_WAV else None
        return self._pcm_bytes if self._format is AudioFormat.PCM else None

    async def read(self, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Bytes `start` to `end` of audio of known length. Raises Damaged and StoreFailed."""
        header = self._wav_header() if self._format is AudioFormat.WAV else b""
        if start < len(header):
            yield header[start:end]
        before = len(header)
        for made in self._track.made:
            begins = before
            before += 2 * made.samples
            if before > start and begins < end:
                content = await asyncio.to_thread(self._store.content, self._track.job_id, made)
                yield content.pcm[max(0, start - begins) : end - begins]

    def _wav_header(self) -> bytes:
        return wav_header(self._track.sample_rate, self._pcm_bytes, disclosed=self._disclosed)

    async def encoded(self) -> AsyncGenerator[bytes, None]:
        """All of it, in any format. Raises Damaged and StoreFailed."""
        track = self._track
        encoder = open_encoder(
            self._format,
            track.sample_rate,
            frame_samples=track.frame_samples,
            num_bytes=self._pcm_bytes,
            disclosed=self._disclosed,
        )
        for made in track.made:
            content = await asyncio.to_thread(self._store.content, track.job_id, made)
            if audio := await asyncio.to_thread(encoder.encode, content.pcm):
                yield audio
        if audio := await asyncio.to_thread(encoder.close):
            yield audio


async def begun(body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same body, whose first part was read: an error before it can still be a status."""
    first = await anext(body, b"")

    async def rest() -> AsyncGenerator[bytes, None]:
        async with aclosing(body):
            yield first
            async for part in body:
                yield part

    return rest()


def parts_of(store: JobStore, job_id: str) -> list[Json]:
    """How far each part of a job is. Blocks. Raises Damaged."""
    job, plan = store.existing_job(job_id), store.plan(job_id)
    made_by_part: dict[int, list[MadeSegment]] = {}
    for made, _ in store.made(job_id):
        made_by_part.setdefault(made.id.part, []).append(made)
    rates = {model: job.info(model).sample_rate for model in job.models}
    return [
        {
            "part": number,
            "custom_id": part.custom_id,
            "seed": part.seed,
            "segments": {"total": len(part.segments), "done": len(done := made_by_part.get(number, []))},
            "audio_s": round(sum(made.samples for made in done) / rates[plan.manners[part.manner].model], 3),
        }
        for number, part in enumerate(plan.parts)
    ]


def words_of(store: JobStore, job_id: str, number: int, made: tuple[MadeSegment, ...]) -> Json:
    """When each word and each segment of a finished part is heard, in seconds of its audio. Blocks. Raises Damaged."""
    plan, job = store.plan(job_id), store.existing_job(job_id)
    part = plan.parts[number]
    info = job.info(plan.manners[part.manner].model)
    text = plan.spoken_text(part)
    times = WordTimes(text, info)
    segments: list[Json] = []
    begun_s = 0.0
    for made_segment, segment in zip(made, part.segments, strict=True):
        content, ends_s = store.content(job.id, made_segment), begun_s + made_segment.samples / info.sample_rate
        chars = segment_start(text.text, [before.text for before in part.segments[: len(segments)]])
        positions = tuple((begun_s + seconds, chars + count) for seconds, count in content.positions)
        reason = FinishReason.STOP if made_segment is made[-1] else None
        times.feed(
            PcmChunk(content.pcm, content.codes, num_text_tokens=0, finish_reason=reason, text_positions=positions)
        )
        begins = round(begun_s + segment.pause_s, 3)
        heard = {"start": begins, "end": round(ends_s, 3), "finish_reason": made_segment.finish_reason}
        segments.append({"text": segment.text, **heard})
        begun_s = ends_s
    words = [{"word": word.text, "start": round(word.start_s, 3), "end": round(word.end_s, 3)} for word in times.take()]
    totals = {"estimated": not info.word_times, "duration_s": round(begun_s, 3)}
    return {"custom_id": part.custom_id, "words": words, **totals, "segments": segments}
