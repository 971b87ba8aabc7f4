"""Chooses the streams of each codec call beside the talker.

All streams of a call want as many frames. The first rule that fits decides:

1. A stream is urgent: it, and others with it.
2. A call runs: none. What may wait waits.
3. Enough streams that have audio in hand want as many frames: these.
4. A listener waits for a first sound: none.
5. Background streams.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from deployments.talker.audio.audio_stream import AudioStream

_FEW_STREAMS = 15  # with more streams, some steps of the ramp are left out
# A call that streams with time share is made once one in _SHARING streams wants as many frames and no call runs. It has
# at most _BULK_FRAMES, so that a first frame does not wait for long, and twice as many beside _MANY_STREAMS: long calls
# take less time for each frame, and the device has none to spare.
_SHARING = 4
_BULK_FRAMES = 96
_MANY_STREAMS = 128
_BACKGROUND_FRAMES = 48  # of a call of background streams beside listeners, whose newcomers wait for its end


@dataclass(frozen=True, slots=True)
class ChosenCall:
    """The next `frames` frames of each stream."""

    streams: list[AudioStream]
    frames: int


@dataclass(slots=True, eq=False)
class _Candidate:
    """A stream that has frames enough for a call now."""

    stream: AudioStream
    frames: int
    goes_last: bool
    has_slack: bool
    deadline_s: float

    @property
    def is_urgent(self) -> bool:
        return not self.has_slack and not self.goes_last


def choose_call(
    streams: Collection[AudioStream], now_s: float, *, is_busy: bool, largest_batch: Callable[[int], int]
) -> ChosenCall | None:
    """The call to make now, if it is time for one. `is_busy`: a call runs. `largest_batch`: streams of a call of so
    many frames, at most.
    """
    candidates = _candidates(streams, now_s)
    if not candidates:
        return None
    first = candidates[0]
    if first.is_urgent:
        alike = [candidate for candidate in candidates if candidate.frames == first.frames]
        most = max(_most_sharing(streams, first.frames), sum(candidate.is_urgent for candidate in alike))
        most = min(largest_batch(first.frames), most)
        return ChosenCall([candidate.stream for candidate in alike[:most]], first.frames)
    if is_busy:
        return None
    shared = None if first.goes_last else _shared_call(candidates, streams)
    return shared or _background_call(candidates, streams, now_s)


def _candidates(streams: Collection[AudioStream], now_s: float) -> list[_Candidate]:
    """Streams with frames enough for a call: urgent ones first, then by when their listeners need audio."""
    load = max(0, len(streams).bit_length() - _FEW_STREAMS.bit_length())
    candidates = list[_Candidate]()
    for stream in streams:
        if stream.earliest_call_s > now_s or not (frames := stream.call_size(now_s, load)):
            continue
        stream.ready_since_s = min(stream.ready_since_s, now_s)
        candidates.append(_Candidate(stream, frames, stream.goes_last, stream.has_slack(now_s), stream.deadline_s()))
    candidates.sort(key=lambda candidate: (candidate.goes_last, candidate.has_slack, candidate.deadline_s))
    return candidates


def _shared_call(candidates: list[_Candidate], streams: Collection[AudioStream]) -> ChosenCall | None:
    """A call of streams that may wait, once enough of them want as many frames."""
    for frames in dict.fromkeys(candidate.frames for candidate in candidates):
        alike = [candidate.stream for candidate in candidates if candidate.frames == frames]
        most = _most_sharing(streams, frames)
        if len(alike) >= _power_of_two(min(most, max(1, len(streams) // _SHARING))):
            return ChosenCall(alike[: _power_of_two(min(most, len(alike)))], frames)
    return None


def _background_call(candidates: list[_Candidate], streams: Collection[AudioStream], now_s: float) -> ChosenCall | None:
    """A call of background streams, unless it would delay a listener's first sound."""
    last = [candidate for candidate in candidates if candidate.goes_last]
    if not last or any(stream.awaits_first_sound(now_s) for stream in streams):
        return None
    frames = last[0].frames
    alike = [candidate.stream for candidate in last if candidate.frames == frames]
    most = _most_sharing(streams, frames)
    if not all(stream.is_background for stream in streams):
        most = min(most, max(1, _BACKGROUND_FRAMES // frames))
    return ChosenCall(alike[: _power_of_two(min(most, len(alike)))], frames)


def _most_sharing(streams: Collection[AudioStream], frames: int) -> int:
    """How many streams with time share a call of so many frames each, at most."""
    bulk = 2 * _BULK_FRAMES if len(streams) >= _MANY_STREAMS else _BULK_FRAMES
    return max(1, bulk // frames)


def _power_of_two(most: int) -> int:
    """The largest that is not above `most`: calls of so many streams are captured as they are, others padded."""
    return 1 << most.bit_length() - 1
