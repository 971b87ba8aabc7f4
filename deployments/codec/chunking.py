"""How many frames of a stream to decode next."""

MIN_LEAD_S = 0.25  # covers a decode and a frame of the talker


class ChunkPlan:
    """Chunk sizes of one stream: a ramp, for an early start and cheap decoding later, that yields to playback.

    `ramp` holds the largest size of the first, second, ... chunk; its last entry repeats. A fast talker fills every
    chunk. With a talker near real time, a chunk is cut short when waiting would let the lead fall below `min_lead_s`.
    """

    def __init__(self, ramp: tuple[int, ...], *, min_lead_s: float = MIN_LEAD_S) -> None:
        assert ramp, "a ramp has at least one size"
        assert min(ramp) >= 1, ramp
        self._ramp = ramp
        self._min_lead_s = min_lead_s
        self._num_chunks = 0

    def next_size(self, available: int, *, ended: bool, lead_s: float) -> int:
        """Frames to decode now, out of those available; 0 means wait for more. A size above 0 counts as decoded.

        `lead_s` is the audio delivered minus the time since its first delivery. It does not matter to the first chunk.
        """
        size = min(available, self._wanted)
        if size < self._wanted and not ended and not self._must_hurry(lead_s):
            return 0
        self._num_chunks += size > 0
        return size

    def patience_s(self, lead_s: float) -> float | None:
        """How long to wait for a frame before asking again; None before the first chunk, when nothing plays yet."""
        return max(0.0, lead_s - self._min_lead_s) if self._num_chunks else None

    @property
    def _wanted(self) -> int:
        return self._ramp[min(self._num_chunks, len(self._ramp) - 1)]

    def _must_hurry(self, lead_s: float) -> bool:
        return self._num_chunks > 0 and lead_s <= self._min_lead_s
