"""Streams whose audio is made on the talker's device: their first frames or all of them.

Frames go in as they are made, PCM comes out as it is ready; the engine knows nothing of slots, batches or graphs.
`choose_call` chooses the calls. `DecodeGate` chooses those of the codec pool, by rules of its own.
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
from deployments.recording_cache import ByRecording
from deployments.speech_detection import first_sound
from deployments.talker.audio.audio_stream import MAX_WAITING, AudioStream, choose_call

SLOTS_PER_RECORDING = 4  # states kept of recordings take a quarter of the memory of streams
_MAX_CALLS = 2  # one runs and one waits, so that later frames make a larger call
_WRITTEN_AT_ONCE = MAX_WAITING // 2  # frames that exist when a stream opens
_LOOK_S = 0.001  # how often to look for a call that only the passing of time makes due


@dataclass(frozen=True, slots=True)
class _RunningCall:
    decode_call: DecodeCall
    streams: list[AudioStream]
    audible: list[bool]
    num_frames: int


class AudioStreams:
    """Streams that want audio from the talker's device. All methods belong to the engine's thread."""

    def __init__(
        self, load: Callable[[], SlotDecoder], *, num_slots: int, frame_s: float, precision: str = "float32"
    ) -> None:
        """`load` is called when the first stream asks for audio: a talker on a CPU is asked in trials only.

        `precision` is that of the decoder.
        """
        self.precision = precision
        self._load, self._num_slots, self._frame_s = load, num_slots, frame_s
        self._free = list(reversed(range(num_slots)))
        self._streams: dict[int, AudioStream] = {}
        self._calls: list[_RunningCall] = []  # oldest first
        self._next_look_s = -math.inf
        self._pcm: list[tuple[int, bytes, int]] = []  # sequence id, samples, and the stream's frames up to there
        self._failed: dict[int, EngineError] = {}
        # Decoder states after recordings, by the recordings' keys and codes: a number of them, not of bytes.
        self._recordings = ByRecording[DecoderState](
            max_bytes=max(1, num_slots // SLOTS_PER_RECORDING), size=lambda _: 1
        )

    @cached_property
    def _decoder(self) -> SlotDecoder:
        return self._load()

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
        num_delivered: int | None = None,
        num_frames: int,
        recording: Codes | None = None,
        key: bytes = b"",
        background: bool = False,
        due_s: float | None = None,
    ) -> None:
        """Decode `num_frames` frames of a stream that follow the first `num_delivered` of `prefix` [frames, groups].

        `num_delivered` is by default all of `prefix`. These frames are recalled, after the codes of a recording that
        speech continues from; `key` is the recording's. Raises Overloaded if every slot is taken. A `background` stream
        is refused as soon as half of the slots are taken. A stream that has ended in the talker keeps its slot until
        its audio is complete. `due_s`: when the listener needs more, if it has a part already.
        """
        if num_frames <= 0:
            return
        while not self._free and self._calls:
            self._collect_call(self._calls.pop(0))
        if not self._free or (background and 2 * len(self._free) <= self._num_slots):
            most = len(self._streams)
            raise Overloaded(
                f"The GPU makes the audio of as many streams as it can ({most}); more replicas raise the limit."
            )
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
            begins_with=begins_with,
        )
        state = self._recordings.find(begins_with)
        if state is not None:
            stream.num_called = stream.num_decoded = stream.num_recalled  # the decoder has its state after these
        self._decoder.begin(slot, state)
        self._streams[sequence_id] = stream
        self._write(stream, codes[: stream.num_wanted])
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
            stream.write(1)
        self._dispatch()
        while any(stream.num_waiting >= MAX_WAITING for stream in streams):  # the slot holds no more
            self._collect_call(self._calls.pop(0))
            self._dispatch()

    def prioritise_newest_call(self) -> None:
        """Let the next work on the talker's device wait for the call that was just made, if it is the only one."""
        if len(self._calls) == 1:
            self._decoder.barrier()

    def finish(self, sequence_id: int) -> bool:
        """No more frames are added. Returns whether there is audio that was not taken yet."""
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
            self._free.append(stream.slot)  # calls run in order: its call under way ends before its next stream

    def is_pending(self, sequence_id: int) -> bool:
        """Whether there is, or will be, audio that was not taken yet."""
        stream = self._streams.get(sequence_id)
        is_decoded = any(owner == sequence_id for owner, *_ in self._pcm) or sequence_id in self._failed
        return is_decoded or (stream is not None and stream.num_decoded < stream.num_written)

    def take(self, num_known: Callable[[int], float] = lambda sequence_id: math.inf) -> list[tuple[int, bytes]]:
        """Audio that is ready: s16le samples by sequence id, each stream's in order and without gaps.

        `num_known`: of how many frames of a sequence the host has the codes. Audio of later ones stays, because a
        device may have made it before the host has looked for the codes.
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
        """Streams whose audio cannot be made; they are closed."""
        failed, self._failed = list(self._failed.items()), {}
        return failed

    def check_integrity(self) -> None:
        """Assert that every slot is held exactly once, by the free list or by one stream."""
        slots = sorted([*self._free, *(stream.slot for stream in self._streams.values())])
        assert slots == list(range(self._num_slots)), f"slots lost or held twice: {slots}"

    def _write(self, stream: AudioStream, codes: Codes) -> None:
        """Frames that exist when a stream opens; there may be more than a slot holds."""
        for start in range(0, len(codes), _WRITTEN_AT_ONCE):
            part = codes[start : start + _WRITTEN_AT_ONCE]
            while stream.num_waiting + len(part) > MAX_WAITING:
                self._dispatch()
                self._collect_call(self._calls.pop(0))
            self._decoder.write([stream.slot] * len(part), range(start, start + len(part)), torch.from_numpy(part))
            stream.write(len(part))

    def _wants(self, sequence_id: int) -> bool:
        stream = self._streams.get(sequence_id)
        return stream is not None and stream.num_written < stream.num_wanted

    def _dispatch(self) -> None:
        while len(self._calls) < _MAX_CALLS and (call := self._start_next_call()) is not None:
            self._calls.append(call)
        self._next_look_s = time.monotonic() + _LOOK_S

    def _start_next_call(self) -> _RunningCall | None:
        if not self._streams:
            return None  # the decoder is loaded with the first stream
        streams, largest = self._streams.values(), self._decoder.largest_batch
        chosen = choose_call(streams, time.monotonic(), is_busy=bool(self._calls), largest_batch=largest)
        return None if chosen is None else self._start_call(chosen.streams, chosen.num_frames)

    def _start_call(self, streams: list[AudioStream], num_frames: int) -> _RunningCall:
        audible = [not stream.is_recalling for stream in streams]
        decode_call = self._decoder.decode([stream.slot for stream in streams], num_frames)
        for stream, was_audible in zip(streams, audible, strict=True):
            stream.enter_call(num_frames)
            if not was_audible and not stream.is_recalling and stream.begins_with:
                self._recordings.keep(stream.begins_with, self._decoder.state(stream.slot))
        return _RunningCall(decode_call, streams, audible, num_frames)

    def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop the cached results of these voices. Returns how many results there were."""
        return self._recordings.forget(voices)

    def _collect_call(self, call: _RunningCall) -> None:
        for stream, audible, pcm in zip(call.streams, call.audible, call.decode_call.result(), strict=True):
            if self._streams.get(stream.sequence_id) is not stream:
                continue  # closed meanwhile
            if isinstance(pcm, EngineError):
                self.close(stream.sequence_id)
                self._failed[stream.sequence_id] = pcm
                continue
            # The call may have reached beyond the end.
            num_frames = min(call.num_frames, stream.num_wanted - stream.num_decoded)
            if audible:
                self._deliver(stream, num_frames, pcm[: num_frames * (len(pcm) // call.num_frames)])
            else:
                stream.recall(num_frames)
            self._close_if_over(stream)

    def _deliver(self, stream: AudioStream, num_frames: int, pcm: Pcm) -> None:
        if not stream.listener.has_begun and first_sound(pcm, round(len(pcm) / (num_frames * self._frame_s))) is None:
            stream.drop_quiet(num_frames)
        else:
            stream.deliver(num_frames, time.monotonic())
        self._pcm.append((stream.sequence_id, pcm.tobytes(), stream.num_delivered))

    def _close_if_over(self, stream: AudioStream) -> None:
        if stream.num_decoded >= stream.num_wanted:
            self.close(stream.sequence_id)
