"""A stream that is decoded on the talker's device, and the selection of streams for the next codec call."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from deployments.codec.plan import GPU_RAMP, ChunkPlan, call_sizes, split_frames
from deployments.codec.slots import CODE_RING
from deployments.listener import Listener

MAX_WAITING = CODE_RING // 2
_MIN_LEAD_S = 0.06  # covers one decode call and one frame of the talker
_CALL_SIZES = call_sizes(GPU_RAMP)
_RECALL_PATIENCE_S = 0.1  # how long newer streams may be served before a recall, which takes many calls
# A stream with _SHARING_LEAD_S of buffered audio waits up to _SHARE_WAIT_S for other streams to share its call.
_SHARING_LEAD_S = 0.4
_SHARE_WAIT_S = 0.1
_FEW_STREAMS = 15  # with more streams, some steps of the ramp are skipped
# A shared call (rule 3) starts once one in _SHARING streams wants the same number of frames. It has at most
# _BULK_FRAMES frames, to limit how long first frames wait. With _MANY_STREAMS streams or more, the limit is doubled,
# because long calls take less time per frame, and the device is fully used.
_SHARING = 4
_BULK_FRAMES = 96
_MANY_STREAMS = 128
_BACKGROUND_FRAMES = 48  # limit on a call for background streams while listeners may have to wait for it


@dataclass(slots=True, eq=False)
class AudioStream:
    """Progress of a stream's frames: how many are written, in calls, and decoded.

    Only this class's methods modify the progress. Each of them updates the time when the next call may be needed.
    """

    sequence_id: int
    slot: int
    num_recalled: int  # leading frames whose audio already exists
    num_wanted: int  # total number of frames to decode, including recalled frames
    opened_s: float
    frame_s: float  # duration of a frame in seconds
    is_background: bool  # whether it is a job segment
    listener: Listener
    num_before: int = 0  # frames of the sequence whose audio the listener had at the start
    num_written: int = 0  # frames whose codes are in the slot
    num_called: int = 0  # frames in running and finished calls
    num_decoded: int = 0
    earliest_call_s: float = math.inf  # `call_size` is 0 before this time
    ready_since_s: float = math.inf  # time from which the next chunk could be decoded
    _plan: ChunkPlan = field(init=False)

    def __post_init__(self) -> None:
        self._plan = ChunkPlan(GPU_RAMP, frame_s=self.frame_s, min_lead_s=_MIN_LEAD_S, in_hand=0.0)

    @property
    def num_waiting(self) -> int:
        return self.num_written - self.num_called

    @property
    def num_delivered(self) -> int:
        """Frames of the sequence whose audio the listener has, after all recalls."""
        return self.num_before + self.num_decoded - self.num_recalled

    @property
    def is_recalling(self) -> bool:
        return self.num_called < self.num_recalled

    @property
    def goes_last(self) -> bool:
        """Whether the stream is decoded last: a background stream whose slot has room for further codes."""
        return self.is_background and 2 * self.num_waiting < MAX_WAITING

    def deadline_s(self) -> float:
        if self.is_recalling and not self.is_background:
            return self.opened_s + _RECALL_PATIENCE_S
        return self.listener.deadline_s(self.opened_s)

    def awaits_first_sound(self, now_s: float) -> bool:
        """Return whether a first sound is imminent. A stream that was opened long ago may be waiting for text."""
        return not self.listener.has_begun and now_s - self.opened_s < _SHARE_WAIT_S

    def has_slack(self, now_s: float) -> bool:
        """Return whether the stream may wait for others to share its call."""
        is_playing = not self.is_recalling and self.listener.has_begun and self.num_waiting < 2 * _CALL_SIZES[0]
        return (
            is_playing and self.listener.lead_s(now_s) >= _SHARING_LEAD_S and now_s - self.ready_since_s < _SHARE_WAIT_S
        )

    def call_size(self, now_s: float, load: int) -> int:
        """Return the number of waiting frames for the next call, or 0 to wait for more. See `ChunkPlan` for `load`."""
        if self.is_recalling:
            return split_frames(min(self.num_waiting, self.num_recalled - self.num_called), _CALL_SIZES)[0]
        lead_s = self.listener.lead_s(now_s) + self._under_way_s
        ended = self.num_written == self.num_wanted
        return self._plan.size(self.num_waiting, ended=ended, lead_s=lead_s, load=load)

    def count_written(self, num_frames: int) -> None:
        """Count `num_frames` frames whose codes have been written to the slot."""
        self.num_written += num_frames
        self._replan()

    def count_called(self, num_frames: int) -> None:
        """Count the frames of the stream's next call, which may extend beyond the stream's end."""
        if not self.is_recalling:
            self._plan.count()
        self.num_called = min(self.num_called + num_frames, self.num_written)
        self.ready_since_s = math.inf
        self._replan()

    def count_recalled(self, num_frames: int) -> None:
        """Count the frames that were decoded again even though the listener had already heard them."""
        self.num_decoded += num_frames
        self._replan()

    def count_all_recalled(self) -> None:
        """Count all recalled frames as decoded, because the slot's state includes them."""
        self.num_called = self.num_decoded = self.num_recalled
        self._replan()

    def count_delivered(self, num_frames: int, now_s: float) -> None:
        """Count the audio for the next frames, which is being delivered now."""
        self.num_decoded += num_frames
        self.listener.deliver(num_frames * self.frame_s, now_s=now_s)
        self._replan()

    def count_silent(self, num_frames: int) -> None:
        """Count the next frames as silent, and restart the ramp, because the listener has not yet heard any sound."""
        self.num_decoded += num_frames
        self._plan.restart()
        self._replan()

    def finish(self) -> None:
        """Mark the end of the stream's frames."""
        self.num_wanted = self.num_written if self.num_written > self.num_recalled else 0
        self._replan()

    @property
    def _under_way_s(self) -> float:
        return (self.num_called - self.num_decoded) * self.frame_s

    def _replan(self) -> None:
        """Update the time from which `call_size` may be above 0."""
        if not self.num_waiting:
            self.earliest_call_s = math.inf
        elif self.is_recalling or self.num_written == self.num_wanted:
            self.earliest_call_s = -math.inf
        else:
            lead_s = self._plan.lead_to_decode_s(self.num_waiting) - self._under_way_s
            may_wait = self.listener.due_s is not None and lead_s < math.inf
            self.earliest_call_s = self.listener.deadline_s(0.0) - lead_s if may_wait else -math.inf


@dataclass(frozen=True, slots=True)
class ChosenCall:
    """A call that decodes the next `num_frames` frames of each stream."""

    streams: list[AudioStream]
    num_frames: int


@dataclass(slots=True, eq=False)
class _Candidate:
    """A stream with enough frames for a call."""

    stream: AudioStream
    num_frames: int
    goes_last: bool
    has_slack: bool
    deadline_s: float

    @property
    def is_urgent(self) -> bool:
        return not self.has_slack and not self.goes_last


def choose_call(
    streams: Collection[AudioStream], now_s: float, *, is_busy: bool, largest_batch: Callable[[int], int]
) -> ChosenCall | None:
    """Return the call to start now, or None to wait.

    All streams of a call want the same number of frames. The first matching rule applies:

    1. Serve an urgent stream, together with other streams that want the same number of frames.
    2. Wait if a call is running, because none of the streams is urgent.
    3. Batch streams that are ahead of playback once enough of them want the same number of frames.
    4. Wait if a listener is waiting for a first sound.
    5. Serve background streams.

    `is_busy` is set while a call is running. `largest_batch` maps frames per stream to the number of streams per call.
    """
    candidates = _candidates(streams, now_s)
    if not candidates:
        return None
    first = candidates[0]
    if first.is_urgent:
        alike = [candidate for candidate in candidates if candidate.num_frames == first.num_frames]
        most = max(_most_sharing(streams, first.num_frames), sum(candidate.is_urgent for candidate in alike))
        most = min(largest_batch(first.num_frames), most)
        return ChosenCall([candidate.stream for candidate in alike[:most]], first.num_frames)
    if is_busy:
        return None
    shared = None if first.goes_last else _shared_call(candidates, streams)
    return shared or _background_call(candidates, streams, now_s)


def _candidates(streams: Collection[AudioStream], now_s: float) -> list[_Candidate]:
    """Return the streams with enough frames for a call: urgent streams first, then by deadline."""
    load = max(0, len(streams).bit_length() - _FEW_STREAMS.bit_length())
    candidates = list[_Candidate]()
    for stream in streams:
        if stream.earliest_call_s > now_s or not (num_frames := stream.call_size(now_s, load)):
            continue
        stream.ready_since_s = min(stream.ready_since_s, now_s)
        candidates.append(
            _Candidate(stream, num_frames, stream.goes_last, stream.has_slack(now_s), stream.deadline_s())
        )
    candidates.sort(key=lambda candidate: (candidate.goes_last, candidate.has_slack, candidate.deadline_s))
    return candidates


def _shared_call(candidates: list[_Candidate], streams: Collection[AudioStream]) -> ChosenCall | None:
    """Return a call for streams that may wait, once enough of them want the same number of frames."""
    for num_frames in dict.fromkeys(candidate.num_frames for candidate in candidates):
        alike = [candidate.stream for candidate in candidates if candidate.num_frames == num_frames]
        most = _most_sharing(streams, num_frames)
        if len(alike) >= _power_of_two(min(most, max(1, len(streams) // _SHARING))):
            return ChosenCall(alike[: _power_of_two(min(most, len(alike)))], num_frames)
    return None


def _background_call(candidates: list[_Candidate], streams: Collection[AudioStream], now_s: float) -> ChosenCall | None:
    """Return a call for background streams, unless it would delay a listener's first sound."""
    last = [candidate for candidate in candidates if candidate.goes_last]
    if not last or any(stream.awaits_first_sound(now_s) for stream in streams):
        return None
    num_frames = last[0].num_frames
    alike = [candidate.stream for candidate in last if candidate.num_frames == num_frames]
    most = _most_sharing(streams, num_frames)
    if not all(stream.is_background for stream in streams):
        most = min(most, max(1, _BACKGROUND_FRAMES // num_frames))
    return ChosenCall(alike[: _power_of_two(min(most, len(alike)))], num_frames)


def _most_sharing(streams: Collection[AudioStream], num_frames: int) -> int:
    """Return the maximum number of streams that can share a call of `num_frames` frames each."""
    bulk = 2 * _BULK_FRAMES if len(streams) >= _MANY_STREAMS else _BULK_FRAMES
    return max(1, bulk // num_frames)


def _power_of_two(most: int) -> int:
    """Round down to a power of two. Calls of these sizes have been captured; other sizes would be padded."""
    return 1 << most.bit_length() - 1
