"""Chooses the streams of each codec call beside the talker.

All streams of a call want the same number of frames. The first rule that fits decides:

1. A stream is urgent: the call has this stream, and others that want as many frames.
2. A call runs already: no call is made, because no stream is urgent.
3. Enough streams whose listeners have audio in hand want the same number of frames: the call has these.
4. A listener waits for a first sound: no call is made.
5. Background streams want frames: the call has these.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from deployments.talker.audio.audio_stream import AudioStream

_FEW_STREAMS = 15  # with more streams, some steps of the ramp are left out
# A shared call (rule 3) is made once one in _SHARING streams wants the same number of frames. It has at most
# _BULK_FRAMES, so that a first frame does not wait for long, and twice as many from _MANY_STREAMS streams on: long
# calls take less time for each frame, and the device has no time to spare.
_SHARING = 4
_BULK_FRAMES = 96
_MANY_STREAMS = 128
_BACKGROUND_FRAMES = 48  # of a call of background streams beside listeners, whose newcomers wait for its end


@dataclass(frozen=True, slots=True)
class ChosenCall:
    """The next `num_frames` frames of each stream."""

    streams: list[AudioStream]
    num_frames: int


@dataclass(slots=True, eq=False)
class _Candidate:
    """A stream that has frames enough for a call now."""

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
    """The call to make now, if it is time for one.

    `is_busy`: a call runs. `largest_batch`: how many streams a call takes, by the frames of each.
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
    """Streams with frames enough for a call: urgent ones first, then by when their listeners need audio."""
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
    """A call of streams that may wait, once enough of them want as many frames."""
    for num_frames in dict.fromkeys(candidate.num_frames for candidate in candidates):
        alike = [candidate.stream for candidate in candidates if candidate.num_frames == num_frames]
        most = _most_sharing(streams, num_frames)
        if len(alike) >= _power_of_two(min(most, max(1, len(streams) // _SHARING))):
            return ChosenCall(alike[: _power_of_two(min(most, len(alike)))], num_frames)
    return None


def _background_call(candidates: list[_Candidate], streams: Collection[AudioStream], now_s: float) -> ChosenCall | None:
    """A call of background streams, unless it would delay a listener's first sound."""
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
    """The most streams that share a call of `num_frames` frames each."""
    bulk = 2 * _BULK_FRAMES if len(streams) >= _MANY_STREAMS else _BULK_FRAMES
    return max(1, bulk // num_frames)


def _power_of_two(most: int) -> int:
    """The largest one up to `most`: calls of a power of two streams are captured, others would be padded."""
    return 1 << most.bit_length() - 1
