"""Sizes of a stream's chunks in the codec pool, and the longest call that streams share."""

from deployments.codec.plan import CALL_FRAMES, MAX_BATCH_FRAMES

RAMP = (1, 1, 2, 4, 8, 12)  # a CPU may need longer for a second chunk of two frames than the first takes to play
# Ramp for streams that share calls. If the replica dies while a first chunk is playing, another takes over in time:
# a takeover (detecting the death, repeating the prefill, decoding) takes 0.18 s on a busy host.
SHARED_RAMP = (3, 3, 4, 8)
# Streams share a call only if it takes at most this long, because an urgent stream may have to wait for the call.
MAX_CALL_S = 0.25
# With at least this many workers, a worker is soon idle again. Streams then share longer calls and may wait for each
# other.
MANY_WORKERS = 4
LONG_CALL_S = 0.4
_LONGEST_FIRST = 4  # maximum number of frames in a first chunk
_OF_PLAYING = 0.6  # share of a chunk's duration that the next chunk may take, because some calls take 50 % longer


def chosen_ramp(workers: int) -> tuple[int, ...]:
    """Return the maximum size in frames of each chunk for this number of workers. The last entry repeats."""
    return SHARED_RAMP if workers >= MANY_WORKERS else RAMP


def fitted_ramp(
    ramp: tuple[int, ...], seconds_per_frame: float, *, wait_s: float, frame_s: float, shared: bool
) -> tuple[int, ...]:
    """Return the ramp whose first chunks play for as long as the next chunk takes to decode.

    `seconds_per_frame` is the cost of a frame without the fixed cost of a call (CALL_FRAMES). `wait_s` is the mean time
    that urgent chunks wait for a worker; some wait twice as long. `frame_s` is the duration of a frame. If calls are
    `shared`, the last chunks play only as long as a full call takes, because more streams share calls of short chunks.
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
    """Return the maximum duration of a shared call with this number of workers."""
    return LONG_CALL_S if workers >= MANY_WORKERS else MAX_CALL_S
