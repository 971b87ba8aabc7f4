"""Chunks that leave the engine: sequences' frames, audio from the talker's device, and the ends of streams."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from deployments.protocol import ALL_FRAMES, Codes, FinishReason, FrameChunk, ModelInfo, Reading
from deployments.talker.audio.audio_streams import AudioStreams
from deployments.talker.state.sequence import Sequence

_MAX_HELD = 8  # maximum number of frames held back to be sent together
# A sequence's frames may wait for further frames if its listener has more than this much buffered audio.
_HOLDING_LEAD_S = 0.41


class OutputQueue:
    """Queue of chunks for the streams' readers.

    Frames leave immediately, or together with later frames if the listener has buffered audio. Audio never leaves
    before its codes. A stream's last chunk leaves after all of the stream's audio.
    """

    def __init__(self, audio: AudioStreams, info: ModelInfo, *, on_gpu: bool) -> None:
        """Create a queue. On a CPU, steps take so long that frames do not wait for later ones."""
        self._audio, self._frame_samples = audio, info.frame_samples
        self._no_codes: Codes = np.zeros((0, info.num_code_groups), dtype=np.int16)
        self.max_held = _MAX_HELD if on_gpu else 1
        self._chunks: list[tuple[int, FrameChunk]] = []  # chunks since the last `pop_chunks`
        self._ends: dict[int, FrameChunk] = {}  # last chunks waiting for their streams' audio

    @property
    def is_idle(self) -> bool:
        return not self._chunks and not self._ends and self._audio.is_idle

    def open(self, sequence: Sequence) -> None:
        """Open the sequence in the decoder, unless it is still open after a preemption. Raises Overloaded."""
        if sequence.is_open:
            return
        request = sequence.request
        resume, reference = request.resume, request.reference
        self._audio.open(
            sequence.id,
            request.prefix,
            num_delivered=None if resume is None else resume.samples // self._frame_samples,
            num_frames=request.gpu_frames,
            recording=request.reference_codes,
            key=b"" if reference is None else reference.key,
            background=sequence.is_background,
            due_s=sequence.listener.due_s,
        )
        sequence.is_open = True

    def add(self, sequence: Sequence, now_s: float) -> None:
        """Add a sequence's new frame, or its end. Frames that can wait are held back."""
        if not self._can_wait(sequence, now_s):
            self._chunks.append((sequence.id, self._unsent(sequence)))

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a stream whose frames already existed when the request arrived."""
        end = FrameChunk(codes=self._no_codes, num_text_tokens=sequence.prompt.num_text_tokens, finish_reason=reason)
        self._chunks.append((sequence.id, end))

    def close(self, sequence_id: int) -> None:
        """Drop a stream whose reader has left."""
        self._ends.pop(sequence_id, None)
        self._audio.close(sequence_id)

    def pop_chunks(self, find: Callable[[int], Sequence | None]) -> list[tuple[int, FrameChunk]]:
        """Return the chunks to send now, by sequence id. `find` returns a sequence, or None if it has ended."""
        added, self._chunks = self._chunks, []
        leaving = []
        for sequence_id, chunk in added:
            if chunk.finish_reason is None or not self._audio.finish(sequence_id):
                leaving.append((sequence_id, chunk))
                continue
            self._ends[sequence_id] = replace(chunk, codes=self._no_codes, pcm=b"")
            if len(chunk.codes):
                leaving.append((sequence_id, replace(chunk, finish_reason=None)))

        def num_known(sequence_id: int) -> float:
            sequence = find(sequence_id)
            return math.inf if sequence is None else sequence.num_frames

        for sequence_id, pcm in self._audio.pop_pcm(num_known):
            if (sequence := find(sequence_id)) is None:
                audio = FrameChunk(codes=self._no_codes, num_text_tokens=0, pcm=pcm)
            else:
                audio = self._unsent(sequence, pcm)
            leaving.append((sequence_id, audio))
        over = [sequence_id for sequence_id in self._ends if not self._audio.is_pending(sequence_id)]
        return leaving + [(sequence_id, self._ends.pop(sequence_id)) for sequence_id in over]

    def _can_wait(self, sequence: Sequence, now_s: float) -> bool:
        """Return whether frames may wait for further frames, because each message costs time in every later stage."""
        if sequence.request.gpu_frames >= ALL_FRAMES:
            return sequence.finish_reason is None  # they will be sent along with their audio
        return sequence.num_frames - sequence.num_sent < self.max_held and _may_wait(sequence, now_s)

    def _unsent(self, sequence: Sequence, pcm: bytes = b"") -> FrameChunk:
        """Return a chunk with all of a sequence's unsent data."""
        first, frames = sequence.num_sent, sequence.frames[sequence.num_sent :]
        places = sequence.progress.pop_places()
        readings = (Reading(first, places),) if places else ()
        clone, sequence.clone_prompt = sequence.clone_prompt, None
        sequence.num_sent = sequence.num_frames
        codes = np.stack(frames) if frames else self._no_codes
        return FrameChunk(
            codes=codes,
            num_text_tokens=sequence.prompt.num_text_tokens,
            finish_reason=sequence.finish_reason,
            pcm=pcm,
            readings=readings,
            clone_prompt=clone,
        )


def _may_wait(sequence: Sequence, now_s: float) -> bool:
    """Return whether unsent frames may wait: the listener has buffered audio, and further frames will follow."""
    goes_on = sequence.finish_reason is None and not sequence.awaits_text
    return goes_on and sequence.sent_lead_s(now_s) > _HOLDING_LEAD_S
