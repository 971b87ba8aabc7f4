"""Read the audio of finished segments from the store, encode the audio during the download, and compute word times.

Only one segment is in memory at a time.
"""

from collections.abc import AsyncGenerator
from functools import partial

from deployments.protocol import FinishReason, PcmChunk
from serve_app.api.responses.listing import run_in_thread
from serve_app.audio.formats import AudioFormat, AudioOptions, CompressedEncoder, RawEncoder, open_encoder
from serve_app.extensions.jobs.job_store import Content, JobStore
from serve_app.extensions.jobs.stored_job import MadeSegment
from serve_app.extensions.jobs.work import Json, Track
from serve_app.extensions.voices.voice_store import Damaged
from serve_app.extensions.word_times.word_times import WordTimes
from serve_app.speech.segments import skip_whitespace

_LONGEST_WAV = 2**32 - 4096  # bytes of audio that leave room for the header
_LONGEST_MP3_KEPT = 16 << 20  # bytes of PCM, almost six minutes; the header of any shorter MP3 contains its length


class StoredAudio:
    """Audio of a finished part or job in one format."""

    def __init__(self, store: JobStore, track: Track, form: AudioOptions) -> None:
        """Parse the segment names. Blocks if the job is long."""
        self._store, self._track, self._form = store, track, form
        self._made = _made(track)
        self._pcm_bytes = 2 * sum(made.samples for made in self._made)

    @property
    def num_bytes(self) -> int | None:
        """Size of the complete audio in bytes, or None if it is not known before encoding.

        `read` requires a known size.
        """
        if self._form.audio_format is AudioFormat.WAV:
            return len(self._header()) + self._pcm_bytes if self._pcm_bytes <= _LONGEST_WAV else None
        return self._pcm_bytes if self._form.audio_format is AudioFormat.PCM else None

    async def read(self, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes from `start` to `end` (exclusive) of audio with a known size. Raises Damaged, StoreFailed."""
        header = self._header()
        if start < len(header):
            yield header[start:end]
        before = len(header)
        for made in self._made:
            begins = before
            before += 2 * made.samples
            if before > start and begins < end:
                content = await run_in_thread(self._store.content, self._track.job_id, made)
                yield content.pcm[max(0, start - begins) : end - begins]

    def _header(self) -> bytes:
        """Return the WAV header, or empty bytes for PCM."""
        return self._open(self._pcm_bytes).close()

    async def encoded(self) -> AsyncGenerator[bytes, None]:
        """Yield the complete audio in any format. Raises Damaged and StoreFailed."""
        is_streamed = self._form.audio_format is AudioFormat.MP3 and self._pcm_bytes > _LONGEST_MP3_KEPT
        encoder = self._open(None if is_streamed else self._pcm_bytes)
        for made in self._made:
            content = await run_in_thread(self._store.content, self._track.job_id, made)
            if audio := await run_in_thread(encoder.encode, content.pcm):
                yield audio
        if audio := await run_in_thread(encoder.close):
            yield audio

    def _open(self, num_bytes: int | None) -> RawEncoder | CompressedEncoder:
        track = self._track
        return open_encoder(self._form, track.sample_rate, frame_samples=track.frame_samples, num_bytes=num_bytes)


def _made(track: Track) -> list[MadeSegment]:
    return [*filter(None, map(MadeSegment.of, track.names))]


async def words_of(store: JobStore, track: Track, number: int) -> Json:
    """Return the start and end of each word and segment in a finished part, in seconds of its audio. Raises Damaged."""
    content = partial(store.content, with_audio=False)
    heard = [(made, await run_in_thread(content, track.job_id, made)) for made in _made(track)]
    return await run_in_thread(_words, store, track.job_id, number, heard)


def _words(store: JobStore, job_id: str, number: int, heard: list[tuple[MadeSegment, Content]]) -> Json:
    if (job := store.job(job_id)) is None:
        raise Damaged(f"the description of {job_id} is missing: the job was deleted during this request")
    plan = store.plan(job, number)
    part = plan.part(number)
    info = job.info(plan.manners[part.manner].model)
    text = plan.spoken_text(part)
    times, spoken = WordTimes(text, info), text.text  # read once, because the property joins the text on each access
    segments: list[Json] = []
    begun_s, chars = 0.0, 0
    for (made, content), segment in zip(heard, part.segments, strict=True):
        ends_s = begun_s + made.samples / info.sample_rate
        chars = skip_whitespace(spoken, chars)
        positions = tuple((begun_s + seconds, chars + count) for seconds, count in content.positions)
        silence = bytes(2 * made.samples)  # WordTimes only uses the audio's length
        reason = FinishReason.STOP if made is heard[-1][0] else None
        times.feed(PcmChunk(silence, content.codes, num_text_tokens=0, finish_reason=reason, text_positions=positions))
        begins = round(begun_s + segment.pause_s, 3)
        times_s = {"start": begins, "end": round(ends_s, 3)}
        segments.append({"text": segment.text, **times_s, "finish_reason": made.finish_reason})
        begun_s, chars = ends_s, chars + len(segment.text)
    words = [{"word": word.text, "start": round(word.start_s, 3), "end": round(word.end_s, 3)} for word in times.take()]
    totals = {"estimated": not info.word_times, "duration_s": round(begun_s, 3)}
    return {"custom_id": part.custom_id, "words": words, **totals, "segments": segments}
