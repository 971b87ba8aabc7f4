"""How many frames of a stream to decode next, on a CPU and on a GPU.

The first call of a shape costs 20 to 170 ms more, because a CPU's matrix library generates kernels for it, and a GPU
replays captured calls. So there are few shapes, and all are called before a replica is ready.
"""

import math
from collections.abc import Iterable

MIN_LEAD_S = 0.25  # covers a decode and a frame of the talker
RAMP = (1, 1, 2, 4, 8, 12)  # a CPU may need longer for a second chunk of two frames than the first one plays
# For streams that share calls. If the replica dies while a first chunk plays, another one takes over in time, because a
# takeover (notice the death, prefill the prompt again, decode) takes 0.18 s on a busy host.
SHARED_RAMP = (3, 3, 4, 8)
GPU_RAMP = (1, 2, 4, 8, 12)  # its sizes are all that one call of a GPU decodes of each stream
# These bound a worker's call: more frames are not cheaper per frame, and busy cores, which share memory, take far
# longer.
MAX_BATCH_SIZE = 16
MAX_BATCH_FRAMES = 16
# Streams share a call only while it takes no longer than this, because an urgent stream may have to wait for it.
MAX_CALL_S = 0.25
# From this number of workers on, another worker is soon free, so streams share longer calls, and may wait for each
# other.
MANY_WORKERS = 4
LONG_CALL_S = 0.4
# The cost of a call besides its frames, in frames: 4 on a Xeon with AMX, 3 with the embedded voice.
CALL_FRAMES = 4.0
_LONGEST_FIRST = 4  # frames of a first chunk
_OF_PLAYING = 0.6  # share of a chunk's playing time that the next chunk may take: some take half as long again
# Calls that make no samples (a recall) may have these many frames, besides the sizes of chunks.
RECALL_SIZES = (12, 24, 48, 96, 192)


def chosen_ramp(workers: int) -> tuple[int, ...]:
    """Maximum frames of a stream's first, second, ... chunk, for this number of workers; the last entry repeats."""
    return SHARED_RAMP if workers >= MANY_WORKERS else RAMP


def fitted_ramp(
    ramp: tuple[int, ...], seconds_per_frame: float, *, wait_s: float, frame_s: float, shared: bool
) -> tuple[int, ...]:
    """The ramp, starting with chunks that play as long as it takes to make the next one.

    `seconds_per_frame` is the cost of a frame besides the call (CALL_FRAMES). `wait_s` is the mean time that urgent
    chunks wait for a worker; some wait twice as long. `frame_s` is how long a frame plays. If calls are `shared`, the
    ramp ends with chunks that play while a full call is made: the shorter they are, the more streams share one.
    """
    sizes = [size for size in sorted({*ramp}) if size <= _LONGEST_FIRST] or [ramp[0]]

    def plays(size: int, during_s: float) -> bool:
        return during_s <= _OF_PLAYING * size * frame_s

    def call_s(frames: int) -> float:
        return seconds_per_frame * (frames + CALL_FRAMES)

    first = next((size for size in sizes if plays(size, 2 * wait_s + call_s(size))), sizes[-1])
    full_s = call_s(MAX_BATCH_FRAMES)
    longer = [size for size in ramp if size >= sizes[-1]]
    last = next((size for size in longer if shared and plays(size, full_s)), ramp[-1])
    return tuple(max(first, min(size, last)) for size in ramp)


def longest_call_s(workers: int) -> float:
    """The longest call that streams share, with this number of workers."""
    return LONG_CALL_S if workers >= MANY_WORKERS else MAX_CALL_S


def call_sizes(ramp: Iterable[int]) -> tuple[int, ...]:
    """Frames that one call may have of a stream whose chunks grow by `ramp`, the largest first."""
    return tuple(sorted({1, *ramp}, reverse=True))


def parts(frames: int, sizes: tuple[int, ...]) -> list[int]:
    """The sizes of the calls for `frames` frames, out of `sizes`, which are in descending order and end in 1."""
    calls: list[int] = []
    for size in sizes:
        count, frames = divmod(frames, size)
        calls += [size] * count
    return calls


def recall_sizes(frames: int, sizes: tuple[int, ...]) -> list[int]:
    """The sizes of `parts`, the largest last: then the last call alone has to reach through the convolutions."""
    return parts(frames, sizes)[::-1]


class ChunkPlan:
    """Chunk sizes of one stream: a ramp, for an early start and cheap decoding later, that yields to playback.

    `ramp` holds the largest size of the first, second, ... chunk; its last entry repeats. A fast talker fills every
    chunk. With a talker near real time, a chunk is cut short when waiting would let the lead fall below `min_lead_s`. A
    chunk widened by load takes a CPU so long that the listener must have buffered `in_hand` of its playing time.
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
        """Frames to decode now, out of those available; 0 means wait for more. A size above 0 counts as decoded.

        The end of a stream is one call if there is time for it, perhaps of more frames than there are. `lead_s` is the
        audio delivered minus the time since its first delivery. It does not affect the first chunk. Under load (a
        number of steps), a stream that already plays takes wider chunks, which cost less per frame.
        """
        size = self.size(available, ended=ended, lead_s=lead_s, load=load)
        if size:
            self.count()
        return size

    def size(self, available: int, *, ended: bool, lead_s: float, load: int = 0) -> int:
        """The result of `next_size`, without counting it: the caller calls `count` once it has decoded them."""
        full_size = self._wanted(load, lead_s)
        size = min(available, full_size)
        if not size or (size < full_size and not ended and not self._must_hurry(lead_s)):
            return 0
        if ended and size == available and not self._must_hurry(lead_s):
            return min(each for each in self._sizes if each >= size)
        return parts(size, self._sizes)[0]

    def lead_to_decode_s(self, available: int) -> float:
        """The largest `lead_s` with which `size` may be above 0 for a stream that has not ended; inf: any."""
        if available >= self._ramp[min(self._num_chunks, len(self._ramp) - 1)]:
            return math.inf
        return self._min_lead_s if self._num_chunks else -math.inf

    def count(self) -> None:
        self._num_chunks += 1

    def patience_s(self, lead_s: float) -> float | None:
        """How long to wait for a frame before asking again; None before the first chunk, when nothing plays yet."""
        return max(0.0, lead_s - self._min_lead_s) if self._num_chunks else None

    def recall_sizes(self, frames: int) -> list[int]:
        """The sizes of the calls that recall the decoder's state after `frames` frames."""
        return recall_sizes(frames, call_sizes((*self._ramp, *RECALL_SIZES)))

    def restart(self) -> None:
        """Begin the ramp again, because all audio so far was quiet."""
        self._num_chunks = 0

    def skip(self, frames: int) -> None:
        """Continue the ramp after `frames` frames that were decoded elsewhere."""
        decoded = 0
        while self._num_chunks < len(self._ramp) and decoded + self._ramp[self._num_chunks] <= frames:
            decoded += self._ramp[self._num_chunks]
            self._num_chunks += 1

    def _wanted(self, load: int, lead_s: float) -> int:
        """The ramp's size; under load as wide as the listener's lead allows."""
        first = min(self._num_chunks, len(self._ramp) - 1)
        planned = self._ramp[first]
        if not self._num_chunks or not load:
            return planned
        most = max(0.0, lead_s) / self._frame_s
        wider = self._ramp[first + 1 : first + 1 + load]
        return max([planned, *(size for size in wider if self._in_hand * size <= most)])

    def _must_hurry(self, lead_s: float) -> bool:
        return self._num_chunks > 0 and lead_s <= self._min_lead_s
