"""Streams that are decoded, partly or completely, on the talker's device.

Frames are added as the talker makes them, and PCM is returned as it becomes ready. The engine does not depend on slots,
batches or graphs. `choose_call` schedules the calls. In the codec pool, `DecodeGate` schedules by different rules.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from deployments.codec.decoder_state import DecoderState
from deployments.codec.slots import DecodeCall, SlotDecoder
from deployments.errors import EngineError, Overloaded
from deployments.listener import Listener
from deployments.protocol import Codes, Pcm
from deployments.recording_cache import RecordingCache
from deployments.speech_detection import first_sound
from deployments.talker.audio.audio_stream import MAX_WAITING, AudioStream, choose_call

SLOTS_PER_RECORDING = 4  # one cached recording state per four slots
_MAX_CALLS = 2  # one running and one queued, so that later frames form a larger call
_WRITTEN_AT_ONCE = MAX_WAITING // 2  # frames per write when a stream opens
_LOOK_S = 0.001  # interval between checks for calls that have become due


@dataclass(frozen=True, slots=True)
class _RunningCall:
    decode_call: DecodeCall
    streams: list[AudioStream]
    audible: list[bool]
    num_frames: int


class AudioStreams:
    """Streams whose audio comes from the talker's device. Call all methods from the engine's thread."""

    def __init__(
        self, load: Callable[[], SlotDecoder], *, num_slots: int, frame_s: float, precision: str = "float32"
    ) -> None:
        """Start with no streams. `load` is called for the first one. A CPU decodes audio only in trials.

        `precision` is the decoder's number format.
        """
        self.precision = precision
        self._load, self._num_slots, self._frame_s = load, num_slots, frame_s
        self._free = list(reversed(range(num_slots)))
        self._streams: dict[int, AudioStream] = {}
        self._calls: list[_RunningCall] = []  # oldest first
        self._next_look_s = -math.inf
        self._pcm: list[tuple[int, bytes, int]] = []  # sequence id, samples, and the stream's number of frames
        self._failed: dict[int, EngineError] = {}
        # Decoder states after recordings, by key and codes. The limit is on the number of states, not on bytes.
        self._recordings = RecordingCache[DecoderState](
            max_bytes=max(1, num_slots // SLOTS_PER_RECORDING), size=lambda _: 1
        )

    @cached_property
    def _decoder(self) -> SlotDecoder:
        return self._load()

    @property
    def is_idle(self) -> bool:
        """Whether no call is running or could be started."""
        waiting = any(stream.num_waiting for stream in self._streams.values())
        return not (self._calls or self._pcm or self._failed or waiting)

    @property
    def has_audio(self) -> bool:
        return bool(self._pcm or self._failed) or bool(self._calls and self._calls[0].decode_call.done)

    @property
    def repaired(self) -> int:
        return self._decoder.repaired if "_decoder" in vars(self) else 0

    def open(
        self,
        sequence_id: int,
        prefix: Codes | None,
        *,
        num_delivered: int | None = None,
        num_frames: int,
        recording: Codes | None = None,
        key: bytes = b"",
        background: bool = False,
        due_s: float | None = None,
    ) -> None:
        """Start decoding `num_frames` frames after the first `num_delivered` of `prefix` [frames, groups].

        `num_delivered` defaults to the length of `prefix`. The delivered frames are recalled, after the codes of
        `recording`, from which the speech continues; `key` identifies the recording. Raises Overloaded if all slots are
        in use, or half of them for a `background` stream. A stream that has ended in the talker keeps its slot until
        its audio is complete. `due_s` is the time at which a listener who has part of the audio needs more.
        """
        if num_frames <= 0:
            return
        while not self._free and self._calls:
            self._collect_call(self._calls.pop(0))
        if not self._free or (background and 2 * len(self._free) <= self._num_slots):
            most = len(self._streams)
            raise Overloaded(f"The GPU decodes {most} streams, which is its limit. More replicas raise the limit.")
        slot = self._free.pop()
        codes = np.zeros((0, 0), np.int16) if prefix is None else prefix
        delivered = num_before = len(codes) if num_delivered is None else num_delivered
        begins_with = b""
        if recording is not None:
            begins_with = b"" if delivered else key + recording.tobytes()
            codes = recording if prefix is None else np.concatenate([recording, prefix])
            delivered += len(recording)
        recalled = min(delivered, self._decoder.reach)
        codes = codes[delivered - recalled :]
        stream = AudioStream(
            sequence_id=sequence_id,
            slot=slot,
            num_recalled=recalled,
            num_wanted=recalled + num_frames,
            opened_s=time.monotonic(),
            frame_s=self._frame_s,
            is_background=background,
            listener=Listener(math.inf if background else due_s),
            num_before=num_before,
        )
        state = self._recordings.find(begins_with)
        if state is not None:
            stream.count_all_recalled()
        self._decoder.start_slot(slot, state)
        self._streams[sequence_id] = stream
        self._write(stream, codes[: stream.num_wanted])
        if begins_with and state is None:
            self._recall_recording(stream, begins_with)
        self._dispatch()

    def _recall_recording(self, stream: AudioStream, key: bytes) -> None:
        """Recall an entire recording at once, because the first audio has to wait for it, and cache the state."""
        try:
            self._decoder.recall(stream.slot, stream.num_recalled)
        except EngineError as error:
            self.close(stream.sequence_id)
            self._failed[stream.sequence_id] = error
            return
        stream.count_all_recalled()
        self._recordings.put(key, self._decoder.state(stream.slot))

    def add_frames(self, sequence_ids: list[int], codes: Tensor) -> None:
        """Add each stream's next frame: codes [streams, groups] on any device, possibly not computed yet."""
        rows = [row for row, sequence_id in enumerate(sequence_ids) if self._wants(sequence_id)]
        if not rows:
            return
        streams = [self._streams[sequence_ids[row]] for row in rows]
        wanted = codes if len(rows) == len(sequence_ids) else codes[rows]
        self._decoder.write([stream.slot for stream in streams], [stream.num_written for stream in streams], wanted)
        for stream in streams:
            stream.count_written(1)
        self._dispatch()
        while any(stream.num_waiting >= MAX_WAITING for stream in streams):  # the slot is full
            self._collect_call(self._calls.pop(0))
            self._dispatch()

    def prioritise_newest_call(self) -> None:
        """Make the talker's device wait for the newly started call before its next work, if it is the only call."""
        if len(self._calls) == 1:
            self._decoder.barrier()

    def finish(self, sequence_id: int) -> bool:
        """Mark the end of a stream's frames. Returns whether some of its audio has not been taken yet."""
        stream = self._streams.get(sequence_id)
        if stream is not None:
            stream.finish()
            self._close_if_over(stream)
            self._dispatch()
        return self.is_pending(sequence_id)

    def close(self, sequence_id: int) -> None:
        self._failed.pop(sequence_id, None)
        stream = self._streams.pop(sequence_id, None)
        if stream is not None:
            self._free.append(stream.slot)  # calls run in order, so a running call ends before the slot is reused

    def is_pending(self, sequence_id: int) -> bool:
        """Return whether the stream has, or will have, audio that has not yet been taken."""
        stream = self._streams.get(sequence_id)
        is_decoded = any(owner == sequence_id for owner, *_ in self._pcm) or sequence_id in self._failed
        return is_decoded or (stream is not None and stream.num_decoded < stream.num_written)

    def pop_pcm(self, num_known: Callable[[int], float] = lambda sequence_id: math.inf) -> list[tuple[int, bytes]]:
        """Return the audio that is ready: s16le samples by sequence id, in order and without gaps within each stream.

        `num_known` returns how many of a sequence's frames have codes that the host has read. Audio for later frames is
        held back, because a device may decode frames before the host reads their codes.
        """
        while self._calls and self._calls[0].decode_call.done:
            self._collect_call(self._calls.pop(0))
            self._next_look_s = -math.inf
        if time.monotonic() >= self._next_look_s:
            self._dispatch()
        made, self._pcm = self._pcm, []
        ready = []
        for sequence_id, pcm, end in made:
            if end <= num_known(sequence_id):
                ready.append((sequence_id, pcm))
            else:
                self._pcm.append((sequence_id, pcm, end))
        return ready

    def take_failures(self) -> list[tuple[int, EngineError]]:
        """Return the streams whose audio cannot be decoded, with their errors. They have already been closed."""
        failed, self._failed = list(self._failed.items()), {}
        return failed

    def check_integrity(self) -> None:
        """Assert that each slot belongs either to the free list or to exactly one stream."""
        slots = sorted([*self._free, *(stream.slot for stream in self._streams.values())])
        assert slots == list(range(self._num_slots)), f"slots lost or held twice: {slots}"

    def _write(self, stream: AudioStream, codes: Codes) -> None:
        """Write the frames that exist when a stream opens. There may be more of them than a slot can hold."""
        for start in range(0, len(codes), _WRITTEN_AT_ONCE):
            part = codes[start : start + _WRITTEN_AT_ONCE]
            while stream.num_waiting + len(part) > MAX_WAITING:
                self._dispatch()
                self._collect_call(self._calls.pop(0))
            self._decoder.write([stream.slot] * len(part), range(start, start + len(part)), torch.from_numpy(part))
            stream.count_written(len(part))

    def _wants(self, sequence_id: int) -> bool:
        stream = self._streams.get(sequence_id)
        return stream is not None and stream.num_written < stream.num_wanted

    def _dispatch(self) -> None:
        while len(self._calls) < _MAX_CALLS and (call := self._start_next_call()) is not None:
            self._calls.append(call)
        self._next_look_s = time.monotonic() + _LOOK_S

    def _start_next_call(self) -> _RunningCall | None:
        if not self._streams:
            return None  # the decoder may not have been loaded yet
        streams, largest = self._streams.values(), self._decoder.largest_batch
        chosen = choose_call(streams, time.monotonic(), is_busy=bool(self._calls), largest_batch=largest)
        return None if chosen is None else self._start_call(chosen.streams, chosen.num_frames)

    def _start_call(self, streams: list[AudioStream], num_frames: int) -> _RunningCall:
        audible = [not stream.is_recalling for stream in streams]
        decode_call = self._decoder.decode([stream.slot for stream in streams], num_frames)
        for stream in streams:
            stream.count_called(num_frames)
        return _RunningCall(decode_call, streams, audible, num_frames)

    def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop cached results for `voices`. Returns the number of results dropped."""
        return self._recordings.forget(voices)

    def _collect_call(self, call: _RunningCall) -> None:
        for stream, audible, pcm in zip(call.streams, call.audible, call.decode_call.result(), strict=True):
            if self._streams.get(stream.sequence_id) is not stream:
                continue  # the stream was closed during the call
            if isinstance(pcm, EngineError):
                self.close(stream.sequence_id)
                self._failed[stream.sequence_id] = pcm
                continue
            # The call may have extended past the end.
            num_frames = min(call.num_frames, stream.num_wanted - stream.num_decoded)
            if audible:
                self._deliver(stream, num_frames, pcm[: num_frames * (len(pcm) // call.num_frames)])
            else:
                stream.count_recalled(num_frames)
            self._close_if_over(stream)

    def _deliver(self, stream: AudioStream, num_frames: int, pcm: Pcm) -> None:
        if not stream.listener.has_begun and first_sound(pcm, round(len(pcm) / (num_frames * self._frame_s))) is None:
            stream.count_silent(num_frames)
        else:
            stream.count_delivered(num_frames, time.monotonic())
        self._pcm.append((stream.sequence_id, pcm.tobytes(), stream.num_delivered))

    def _close_if_over(self, stream: AudioStream) -> None:
        if stream.num_decoded >= stream.num_wanted:
            self.close(stream.sequence_id)
