"""Assembles the chunks of several segments into the chunks of one utterance."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from deployments.protocol import SAMPLE_BYTES, FinishReason, ModelInfo, PcmChunk, Reading
from serve_app.audio.formats import Filter
from serve_app.speech.segments import ended_badly


class UtteranceAssembler:
    """Assembler that converts the chunks of segments to chunks of one utterance.

    `num_text_tokens` is the running total over segments. Only the utterance's last chunk has a finish reason: the first
    reason other than STOP from any segment, or STOP if there is none.
    """

    def __init__(self, info: ModelInfo) -> None:
        self._timeline = _Timeline(info)
        self._info = info
        self._filter: Filter | None = None  # for a segment with a different speed
        self._number = 0  # of the current segment
        self._tokens_before = 0  # tokens of the previous segments
        self._tokens = 0  # tokens of the current segment
        self._cut_short: FinishReason | None = None
        no_codes = np.zeros((0, info.num_code_groups), np.int16)
        self._nothing = PcmChunk(b"", no_codes, num_text_tokens=0)  # empty copy of the last chunk
        self.has_audio = False
        self.has_ended = False

    def start_segment(self, number: int, start: int, *, speed: float) -> None:
        """Start segment `number`, which begins after `start` characters of the text."""
        self._timeline.start_segment(start, speed)
        self._filter = Filter(self._info.sample_rate, speed=speed) if speed != 1 else None
        self._number = number
        self._tokens_before += self._tokens
        self._tokens = 0

    def has_failed(self, chunk: PcmChunk) -> bool:
        """Return whether the chunk ends the speech abnormally, or without audio, before any audio has been sent."""
        if chunk.finish_reason is None or self.has_audio:
            return False
        return not chunk.pcm or ended_badly(chunk.finish_reason)

    async def add(self, chunk: PcmChunk, *, is_last: bool) -> PcmChunk:
        """Add a chunk of the current segment. Set `is_last` if it is certain that no other segment follows."""
        positions = self._timeline.add(chunk)
        if self._filter is not None:
            chunk = replace(chunk, pcm=await asyncio.to_thread(_filtered, self._filter, chunk))
        self._timeline.deliver(chunk.num_samples)
        self._tokens = chunk.num_text_tokens
        self.has_audio = self.has_audio or bool(chunk.pcm)
        if chunk.finish_reason is not FinishReason.STOP:
            self._cut_short = self._cut_short or chunk.finish_reason
        self.has_ended = chunk.finish_reason is not None and is_last
        self._nothing = chunk.emptied()
        return replace(
            chunk,
            num_text_tokens=self._tokens_before + self._tokens,
            finish_reason=(self._cut_short or chunk.finish_reason) if self.has_ended else None,
            text_positions=positions,
            readings=(),
            segment=self._number,
        )

    def silence(self, seconds: float) -> PcmChunk:
        """Return the chunk for a pause in the text, before a segment or at the end."""
        self.has_audio = True
        return self._empty(pcm=self._timeline.silence(seconds))

    def end(self) -> PcmChunk:
        return self._empty(finish_reason=self._cut_short or FinishReason.STOP)

    def _empty(self, **fields: Any) -> PcmChunk:
        return replace(self._nothing, num_text_tokens=self._tokens_before + self._tokens, **fields)


class _Timeline:
    """Maps times in an utterance's delivered audio to the parts of the text that the talkers have read."""

    def __init__(self, info: ModelInfo) -> None:
        self._sample_rate, self._frame_samples = info.sample_rate, info.frame_samples
        self._start = 0  # characters of the text before the segment
        self._before = 0  # samples before the segment
        self._made = 0  # samples of the segment as received
        self._delivered = 0  # samples of the segment after any speed change
        self._speed = 1.0
        self._dropped: int | None = None  # silent samples that were dropped at the start of the segment
        self._readings: list[Reading] = []

    def start_segment(self, start: int, speed: float) -> None:
        """Start a segment that begins after `start` characters of the text."""
        self._before += self._delivered
        self._start = start
        self._speed = speed
        self._made = self._delivered = 0
        self._dropped = None
        self._readings = []

    def silence(self, seconds: float) -> bytes:
        samples = int(seconds * self._sample_rate)
        self._before += samples
        return bytes(SAMPLE_BYTES * samples)

    def add(self, chunk: PcmChunk) -> tuple[tuple[float, float], ...]:
        """Return the chunk's `text_positions`, one for the middle of each frame that was read. Empty before the first
        sound.
        """
        self._readings += chunk.readings
        self._made += chunk.num_samples
        if chunk.pcm:
            self._dropped = chunk.position - self._made
        if self._dropped is None:
            return ()
        readings, self._readings = self._readings, []
        return tuple(
            (self._seconds(reading.first + number, self._dropped), self._start + chars)
            for reading in readings
            for number, chars in enumerate(reading.chars)
        )

    def deliver(self, num_samples: int) -> None:
        """Count samples that have been sent, after the speed change."""
        self._delivered += num_samples

    def _seconds(self, frame: int, dropped: int) -> float:
        samples = self._before + ((frame + 0.5) * self._frame_samples - dropped) / self._speed
        return max(0.0, samples / self._sample_rate)


def _filtered(faster: Filter, chunk: PcmChunk) -> bytes:
    """Return the chunk's audio at the segment's speed. To the last chunk, append what is left in the filter."""
    pcm = faster.feed(chunk.pcm)
    return pcm + faster.close() if chunk.finish_reason is not None else pcm
