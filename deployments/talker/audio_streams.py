"""Streams whose audio is made beside the talker, on its device: their first frames or all of them.

Frames go in as they are made, PCM comes out as it is ready; the engine says nothing about slots, batches or graphs.
`DecodeGate` chooses the calls of the codec pool, by rules of its own.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from deployments.audio.recording_cache import Forgotten
from deployments.audio.speech_detection import first_sound
from deployments.codec.plan import GPU_RAMP, ChunkPlan, call_sizes, parts
from deployments.codec.slots import CODE_RING, DecodeCall, SlotDecoder
from deployments.codec.state import DecoderState
from deployments.errors import EngineError, Overloaded
from deployments.listener import Listener
from deployments.protocol import Codes

_MIN_LEAD_S = 0.06  # covers a decode and a frame of the talker
_CALL_SIZES = call_sizes(GPU_RAMP)
SLOTS_PER_RECORDING = 4  # states kept of recordings take a quarter of the memory of streams
_MAX_CALLS = 2  # one runs and one waits, so that later frames make a larger call
_FEW_STREAMS = 15  # with more streams, some steps of the ramp are left out
_MAX_WAITING = CODE_RING // 2
_WRITTEN_AT_ONCE = _MAX_WAITING // 2  # frames that exist when a stream opens
_RECALL_PATIENCE_S = 0.1  # a recall takes many calls, so younger streams may go first for so long
# A stream whose listener has _SHARING_LEAD_S of audio in hand waits for others that share its call. The call is made
# once one in _SHARING streams wants as many frames and no call runs, at the latest after _SHARE_WAIT_S. It has at most
# _BULK_FRAMES, so that a first frame does not wait for long, and twice as many beside _MANY_STREAMS: long calls take
# less time for each frame, and the device has none to spare.
_SHARING_LEAD_S = 0.4
_SHARE_WAIT_S = 0.1
_SHARING = 4
_BULK_FRAMES = 96
_MANY_STREAMS = 128
_LOOK_S = 0.001  # how often to look for a call that only the passing of time makes due


@dataclass(slots=True, eq=False)
class _AudioStream:
    sequence_id: int
    slot: int
    num_recalled: int  # frames at the beginning whose audio exists already
    num_wanted: int  # frames to decode in all, with the recalled ones
    opened_s: float
    plan: ChunkPlan
    listener: Listener
    is_background: bool  # a segment of a job
    num_written: int = 0  # frames whose codes are in the slot
    num_called: int = 0  # frames in calls, finished or not
    num_decoded: int = 0
    begins_with: bytes = b""  # while a recording is recalled that others may share: its key and codes
    earliest_call_s: float = math.inf  # before then it has too few frames for a call
    ready_since_s: float = math.inf  # when its next chunk could have been decoded

    def plan_call(self, frame_s: float) -> None:
        """Set `earliest_call_s`, after each change of its frames or its plan: `_launch_next` looks at no stream before.

        `frame_s`: seconds of audio of a frame.
        """
        if not self.num_waiting:
            self.earliest_call_s = math.inf
        elif self.is_recalling or self.num_written == self.num_wanted:
            self.earliest_call_s = -math.inf
        else:
            lead_s = self.plan.lead_to_decode_s(self.num_waiting) - (self.num_called - self.num_decoded) * frame_s
            may_wait = self.listener.due_s is not None and lead_s < math.inf
            self.earliest_call_s = self.listener.deadline_s(0.0) - lead_s if may_wait else -math.inf

    @property
    def num_waiting(self) -> int:
        return self.num_written - self.num_called

    @property
    def is_recalling(self) -> bool:
        return self.num_called < self.num_recalled

    def deadline_s(self) -> float:
        if self.is_recalling and not self.is_background:
            return self.opened_s + _RECALL_PATIENCE_S
        return self.listener.deadline_s(self.opened_s)

    @property
    def goes_last(self) -> bool:
        """Whether it waits until no other stream wants to be decoded: a background stream, while its slot has room."""
        return self.is_background and 2 * self.num_waiting < _MAX_WAITING

    def awaits_first_sound(self, now_s: float) -> bool:
        """Whether its listener hears it soon. One that opened long ago may wait for text that is not written."""
        return not self.listener.has_begun and now_s - self.opened_s < _SHARE_WAIT_S

    def has_slack(self, now_s: float) -> bool:
        """Whether it may wait for others to share its call."""
        is_playing = not self.is_recalling and self.listener.has_begun and self.num_waiting < 2 * _CALL_SIZES[0]
        return (
            is_playing and self.listener.lead_s(now_s) >= _SHARING_LEAD_S and now_s - self.ready_since_s < _SHARE_WAIT_S
        )


@dataclass(slots=True, eq=False)
class _Candidate:
    """A stream that has frames enough for a call now."""

    stream: _AudioStream
    frames: int
    goes_last: bool
    has_slack: bool
    deadline_s: float

    @property
    def is_urgent(self) -> bool:
        return not self.has_slack and not self.goes_last


@dataclass(frozen=True, slots=True)
class _RunningCall:
    decode_call: DecodeCall
    streams: list[_AudioStream]
    audible: list[bool]
    frames: int


class AudioStreams:
    """Streams that want audio from the talker's device. All methods belong to the engine's thread."""

    def __init__(self, load: Callable[[], SlotDecoder], *, frame_s: float, precision: str = "float32") -> None:
        """`load` is called when the first stream asks for audio: a talker on a CPU is asked in trials only.

        `precision` is that of the decoder.
        """
        self.precision = precision
        self._load, self._frame_s = load, frame_s
        self._streams: dict[int, _AudioStream] = {}
        self._calls: list[_RunningCall] = []  # oldest first
        self._next_look_s = -math.inf
        self._pcm: list[tuple[int, bytes]] = []
        self._failed: dict[int, EngineError] = {}
        # Decoder states after recordings, by the recordings' keys and codes. The last used one is the last.
        self._recordings: OrderedDict[bytes, DecoderState] = OrderedDict()
        self._forgotten = Forgotten()

    @cached_property
    def _decoder(self) -> SlotDecoder:
        return self._load()

    @cached_property
    def _free(self) -> list[int]:
        return list(reversed(range(self._decoder.num_slots)))

    @property
    def is_idle(self) -> bool:
        """Whether no call runs and none can be made."""
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
        delivered_frames: int | None = None,
        frames: int,
        recording: Codes | None = None,
        key: bytes = b"",
        background: bool = False,
    ) -> None:
        """Decode `frames` frames of a stream that follow the first `delivered_frames` of `prefix` [frames, groups].

        `delivered_frames` is by default all of `prefix`. These frames are recalled, after the codes of a recording from
        which speech goes on; `key` is the recording's. Raises Overloaded if every slot is taken. A `background`
        stream is refused as soon as half of the slots are taken. A stream that has ended in the talker keeps its slot
        until its audio is complete.
        """
        if frames <= 0:
            return
        while not self._free and self._calls:
            self._collect(self._calls.pop(0))
        if not self._free or (background and 2 * len(self._free) <= self._decoder.num_slots):
            most = len(self._streams)
            raise Overloaded(
                f"The GPU makes the audio of as many streams as it can ({most}); more replicas raise the limit."
            )
        slot = self._free.pop()
        known = np.zeros((0, 0), np.int16) if prefix is None else prefix
        delivered = len(known) if delivered_frames is None else delivered_frames
        begins_with = b""
        if recording is not None:
            begins_with = b"" if delivered else key + recording.tobytes()
            known = recording if prefix is None else np.concatenate([recording, prefix])
            delivered += len(recording)
        recalled = min(delivered, self._decoder.reach)
        known = known[delivered - recalled :]
        stream = _AudioStream(
            sequence_id=sequence_id,
            slot=slot,
            num_recalled=recalled,
            num_wanted=recalled + frames,
            opened_s=time.monotonic(),
            plan=ChunkPlan(GPU_RAMP, frame_s=self._frame_s, min_lead_s=_MIN_LEAD_S, in_hand=0.0),
            listener=Listener.of(background=background),
            is_background=background,
            begins_with=begins_with,
        )
        state = self._recordings.get(begins_with)
        if state is not None:
            self._recordings.move_to_end(begins_with)
            stream.num_called = stream.num_decoded = recalled
        self._decoder.begin(slot, state)
        self._streams[sequence_id] = stream
        self._write(stream, known[: stream.num_wanted])
        self._dispatch()

    def add_frames(self, sequence_ids: list[int], codes: Tensor) -> None:
        """The next frame of each stream: codes [streams, groups], on any device, perhaps not computed yet."""
        rows = [row for row, sequence_id in enumerate(sequence_ids) if self._wants(sequence_id)]
        if not rows:
            return
        streams = [self._streams[sequence_ids[row]] for row in rows]
        wanted = codes if len(rows) == len(sequence_ids) else codes[rows]
        self._decoder.write([stream.slot for stream in streams], [stream.num_written for stream in streams], wanted)
        for stream in streams:
            stream.num_written += 1
            stream.plan_call(self._frame_s)
        self._dispatch()
        while any(stream.num_waiting >= _MAX_WAITING for stream in streams):  # the slot holds no more
            self._collect(self._calls.pop(0))
            self._dispatch()

    def prioritise_newest_call(self) -> None:
        """Let the next work on the talker's device wait for the call that was just made, if it is the only one."""
        if len(self._calls) == 1:
            self._decoder.barrier()

    def finish(self, sequence_id: int) -> bool:
        """No more frames are added. Returns whether there is audio that was not taken yet."""
        stream = self._streams.get(sequence_id)
        if stream is not None:
            stream.num_wanted = stream.num_written if stream.num_written > stream.num_recalled else 0
            stream.plan_call(self._frame_s)
            self._close_if_over(stream)
            self._dispatch()
        return self.is_pending(sequence_id)

    def close(self, sequence_id: int) -> None:
        self._failed.pop(sequence_id, None)
        stream = self._streams.pop(sequence_id, None)
        if stream is not None:
            self._free.append(stream.slot)  # calls run in order: its call under way ends before its next stream

    def is_pending(self, sequence_id: int) -> bool:
        """Whether there is, or will be, audio that was not taken yet."""
        stream = self._streams.get(sequence_id)
        is_decoded = any(other == sequence_id for other, _ in self._pcm) or sequence_id in self._failed
        return is_decoded or (stream is not None and stream.num_decoded < stream.num_written)

    def take(self) -> list[tuple[int, bytes]]:
        """Audio that is ready: s16le samples by sequence id, each stream's in order and without gaps."""
        while self._calls and self._calls[0].decode_call.done:
            self._collect(self._calls.pop(0))
            self._next_look_s = -math.inf
        if time.monotonic() >= self._next_look_s:
            self._dispatch()
        ready, self._pcm = self._pcm, []
        return ready

    def take_failures(self) -> list[tuple[int, EngineError]]:
        """Streams whose audio cannot be made; they are closed."""
        failed, self._failed = list(self._failed.items()), {}
        return failed

    def check_integrity(self) -> None:
        """Assert that every slot is held exactly once, by the free list or by one stream."""
        if "_free" not in vars(self):
            return  # no stream has asked for audio yet
        slots = sorted([*self._free, *(stream.slot for stream in self._streams.values())])
        assert slots == list(range(self._decoder.num_slots)), f"slots lost or held twice: {slots}"

    def _write(self, stream: _AudioStream, codes: Codes) -> None:
        """Frames that exist when a stream opens; there may be more than a slot holds."""
        for start in range(0, len(codes), _WRITTEN_AT_ONCE):
            part = codes[start : start + _WRITTEN_AT_ONCE]
            while stream.num_waiting + len(part) > _MAX_WAITING:
                self._dispatch()
                self._collect(self._calls.pop(0))
            self._decoder.write([stream.slot] * len(part), range(start, start + len(part)), torch.from_numpy(part))
            stream.num_written += len(part)
            stream.plan_call(self._frame_s)

    def _wants(self, sequence_id: int) -> bool:
        stream = self._streams.get(sequence_id)
        return stream is not None and stream.num_written < stream.num_wanted

    def _dispatch(self) -> None:
        while len(self._calls) < _MAX_CALLS and (call := self._launch_next()) is not None:
            self._calls.append(call)
        self._next_look_s = time.monotonic() + _LOOK_S

    def _launch_next(self) -> _RunningCall | None:
        """Launch a call of streams that want as many frames, if it is time for one. The first rule that fits decides:

        1. A stream is urgent: it, and others with it.
        2. A call runs: none. What may wait waits.
        3. Enough streams that have audio in hand want as many frames: these.
        4. A listener waits for a first sound: none.
        5. Background streams.
        """
        now_s = time.monotonic()
        candidates = self._candidates(now_s)
        if not candidates:
            return None
        first = candidates[0]
        if not first.is_urgent:
            if self._calls:
                return None
            shared = None if first.goes_last else self._launch_shared(candidates)
            return shared or self._launch_background(candidates, now_s)
        alike = [each for each in candidates if each.frames == first.frames]
        num_urgent = sum(each.is_urgent for each in alike)
        most = min(self._decoder.largest_batch(first.frames), max(num_urgent, self._bulk_frames // first.frames))
        return self._launch([each.stream for each in alike[:most]], first.frames)

    @property
    def _bulk_frames(self) -> int:
        """Frames of a call that streams with time share, at most."""
        return 2 * _BULK_FRAMES if len(self._streams) >= _MANY_STREAMS else _BULK_FRAMES

    def _candidates(self, now_s: float) -> list[_Candidate]:
        """Streams with frames enough for a call: urgent ones first, then by when their listeners need audio."""
        found = list[_Candidate]()
        for stream in self._streams.values():
            if stream.earliest_call_s > now_s or not (frames := self._size(stream, now_s)):
                continue
            stream.ready_since_s = min(stream.ready_since_s, now_s)
            deadline_s = stream.deadline_s()
            found.append(_Candidate(stream, frames, stream.goes_last, stream.has_slack(now_s), deadline_s))
        found.sort(key=lambda each: (each.goes_last, each.has_slack, each.deadline_s))
        return found

    def _launch_shared(self, candidates: list[_Candidate]) -> _RunningCall | None:
        """Launch a call of streams that may wait, once enough of them want as many frames."""
        for frames in dict.fromkeys(each.frames for each in candidates):
            streams = [each.stream for each in candidates if each.frames == frames]
            most = max(1, self._bulk_frames // frames)
            if len(streams) >= _power_of_two(min(most, max(1, len(self._streams) // _SHARING))):
                return self._launch(streams[: _power_of_two(min(most, len(streams)))], frames)
        return None

    def _launch_background(self, candidates: list[_Candidate], now_s: float) -> _RunningCall | None:
        """Launch a call of background streams, unless it would delay a listener's first sound."""
        last = [each for each in candidates if each.goes_last]
        if not last or any(stream.awaits_first_sound(now_s) for stream in self._streams.values()):
            return None
        frames = last[0].frames
        most = max(1, self._bulk_frames // frames)
        streams = [each.stream for each in last if each.frames == frames]
        return self._launch(streams[: _power_of_two(min(most, len(streams)))], frames)

    def _launch(self, streams: list[_AudioStream], frames: int) -> _RunningCall:
        audible = [not stream.is_recalling for stream in streams]
        decode_call = self._decoder.decode([stream.slot for stream in streams], frames)
        for stream in streams:
            was_recalling = stream.is_recalling
            if not was_recalling:
                stream.plan.count()
            stream.num_called = min(stream.num_called + frames, stream.num_written)
            stream.ready_since_s = math.inf
            stream.plan_call(self._frame_s)
            if was_recalling and not stream.is_recalling and stream.begins_with:
                self._keep(stream)
        return _RunningCall(decode_call, streams, audible, frames)

    def _keep(self, stream: _AudioStream) -> None:
        """Keep the decoder's state after a stream's recording, in place of the least recently used one."""
        if stream.begins_with in self._forgotten:
            return
        self._recordings[stream.begins_with] = self._decoder.state(stream.slot)
        if len(self._recordings) > max(1, self._decoder.num_slots // SLOTS_PER_RECORDING):
            self._recordings.popitem(last=False)

    def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop what is kept of these voices. Returns how many results there were."""
        self._forgotten.add(voices)
        over = [key for key in self._recordings if key in self._forgotten]
        for key in over:
            del self._recordings[key]
        return len(over)

    def _size(self, stream: _AudioStream, now_s: float) -> int:
        """Frames to decode of a stream that has some; 0 means wait for more."""
        if stream.is_recalling:
            return parts(min(stream.num_waiting, stream.num_recalled - stream.num_called), _CALL_SIZES)[0]
        under_way_s = (stream.num_called - stream.num_decoded) * self._frame_s
        lead_s, ended = stream.listener.lead_s(now_s) + under_way_s, stream.num_written == stream.num_wanted
        load = max(0, len(self._streams).bit_length() - _FEW_STREAMS.bit_length())
        return stream.plan.size(stream.num_waiting, ended=ended, lead_s=lead_s, load=load)

    def _collect(self, call: _RunningCall) -> None:
        for stream, audible, pcm in zip(call.streams, call.audible, call.decode_call.result(), strict=True):
            if self._streams.get(stream.sequence_id) is not stream:
                continue  # closed meanwhile
            frames = min(call.frames, stream.num_wanted - stream.num_decoded)  # it may have reached beyond the end
            stream.num_decoded += frames
            if isinstance(pcm, EngineError):
                self.close(stream.sequence_id)
                self._failed[stream.sequence_id] = pcm
                continue
            if audible:
                sample_rate = round(len(pcm) / (call.frames * self._frame_s))
                pcm = pcm[: frames * (len(pcm) // call.frames)]
                if not stream.listener.has_begun and first_sound(pcm, sample_rate) is None:
                    stream.plan.restart()  # a quiet start is dropped, so the ramp begins with the first sound
                else:
                    stream.listener.deliver(frames * self._frame_s, now_s=time.monotonic())
                self._pcm.append((stream.sequence_id, pcm.tobytes()))
            stream.plan_call(self._frame_s)
            self._close_if_over(stream)

    def _close_if_over(self, stream: _AudioStream) -> None:
        if stream.num_decoded >= stream.num_wanted:
            self.close(stream.sequence_id)


def _power_of_two(most: int) -> int:
    """The largest that is not above `most`: calls of so many streams are recorded as they are, others padded."""
    return 1 << most.bit_length() - 1
