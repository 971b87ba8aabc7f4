"""How many of a stream's frames to decode next, on a CPU and on a GPU.

The first call of a shape takes 20 to 170 ms longer: a CPU's matrix library generates kernels for the shape, and a GPU
captures the call. There are therefore only a few shapes, and a replica runs each of them once before it is ready.
"""

import math
from collections.abc import Iterable

MIN_LEAD_S = 0.25  # covers one decode call and one frame of the talker
GPU_RAMP = (1, 2, 4, 8, 12)  # the only allowed numbers of frames per stream in a GPU call
# Limits for a worker's call. More frames do not reduce the cost per frame, and take much longer on busy cores that
# share memory.
MAX_BATCH_SIZE = 16
MAX_BATCH_FRAMES = 16
# Fixed cost of a call, expressed in frames: 4 on a Xeon with AMX, 3 with the embedded voice.
CALL_FRAMES = 4.0
# Additional call sizes for recalls, which compute states without samples
RECALL_SIZES = (12, 24, 48, 96, 192)


def call_sizes(ramp: Iterable[int]) -> tuple[int, ...]:
    """Return the numbers of frames that a call may have for chunks of `ramp`, in descending order."""
    return tuple(sorted({1, *ramp}, reverse=True))


def split_frames(frames: int, sizes: tuple[int, ...]) -> list[int]:
    """Split `frames` frames into calls with sizes from `sizes`, which are in descending order and end with 1."""
    calls: list[int] = []
    for size in sizes:
        count, frames = divmod(frames, size)
        calls += [size] * count
    return calls


def recall_sizes(frames: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the sizes of `split_frames` in ascending order. Only the last call then has to run the convolutions."""
    return split_frames(frames, sizes)[::-1]


class ChunkPlan:
    """Chunk sizes for one stream: a ramp from an early start to cheap decoding, adjusted to the state of playback.

    `ramp` holds the maximum size of each chunk in order; the last entry repeats. A fast talker fills each chunk. With a
    talker near real time, a chunk is cut short if waiting would reduce the lead below `min_lead_s`. Load widens chunks,
    which take longer on a CPU. The listener must have buffered the share `in_hand` of a widened chunk's duration.
    """

    def __init__(
        self, ramp: tuple[int, ...], *, frame_s: float, min_lead_s: float = MIN_LEAD_S, in_hand: float = 0.75
    ) -> None:
        assert ramp, "a ramp has at least one size"
        assert min(ramp) >= 1, ramp
        self._ramp, self._sizes = ramp, call_sizes(ramp)
        self._frame_s, self._min_lead_s, self._in_hand = frame_s, min_lead_s, in_hand
        self._num_chunks = 0

    def next_size(self, available: int, *, ended: bool, lead_s: float, load: int = 0) -> int:
        """Return the number of frames to decode now, or 0 to wait for more. A number above 0 counts as decoded.

        If there is time, a stream ends with one call, perhaps of more frames than are available. `lead_s` is the
        delivered audio minus the time since the first delivery. The lead does not affect the first chunk. Under `load`
        (a number of steps), a playing stream gets wider chunks, which cost less per frame.
        """
        size = self.size(available, ended=ended, lead_s=lead_s, load=load)
        if size:
            self.count()
        return size

    def size(self, available: int, *, ended: bool, lead_s: float, load: int = 0) -> int:
        """Return the result of `next_size` without counting it. The caller calls `count` after decoding the frames."""
        full_size = self._wanted(load, lead_s)
        size = min(available, full_size)
        if not size or (size < full_size and not ended and not self._must_hurry(lead_s)):
            return 0
        if ended and size == available and not self._must_hurry(lead_s):
            return min(each for each in self._sizes if each >= size)
        return split_frames(size, self._sizes)[0]

    def lead_to_decode_s(self, available: int) -> float:
        """Return the maximum `lead_s` at which `size` may be above 0 for a running stream; inf if any lead will do."""
        if available >= self._ramp[min(self._num_chunks, len(self._ramp) - 1)]:
            return math.inf
        return self._min_lead_s if self._num_chunks else -math.inf

    def count(self) -> None:
        self._num_chunks += 1

    def patience_s(self, lead_s: float) -> float | None:
        """Return the seconds to wait for another frame; None before the first chunk, while playback has not started."""
        return max(0.0, lead_s - self._min_lead_s) if self._num_chunks else None

    def recall_sizes(self, frames: int) -> list[int]:
        """Return the sizes of the calls that recall the decoder's state after `frames` frames."""
        return recall_sizes(frames, call_sizes((*self._ramp, *RECALL_SIZES)))

    def restart(self) -> None:
        """Restart the ramp of chunk sizes, because all audio so far has been silent."""
        self._num_chunks = 0

    def skip(self, frames: int) -> None:
        """Advance the ramp past `frames` frames that were decoded elsewhere."""
        decoded = 0
        while self._num_chunks < len(self._ramp) and decoded + self._ramp[self._num_chunks] <= frames:
            decoded += self._ramp[self._num_chunks]
            self._num_chunks += 1

    def _wanted(self, load: int, lead_s: float) -> int:
        """Return the ramp's size, or a larger one under load if the listener's lead permits it."""
        first = min(self._num_chunks, len(self._ramp) - 1)
        planned = self._ramp[first]
        if not self._num_chunks or not load:
            return planned
        most = max(0.0, lead_s) / self._frame_s
        wider = self._ramp[first + 1 : first + 1 + load]
        return max([planned, *(size for size in wider if self._in_hand * size <= most)])

    def _must_hurry(self, lead_s: float) -> bool:
        return self._num_chunks > 0 and lead_s <= self._min_lead_s
