"""Detection of a stream's first sound, and of speech that ends early or continues beyond its text.

Leading silence is removed so that the first byte is close to the first sound. If a talker has no alignment head, only
its codes are available, and its own limit is far beyond any text's length. Audio after the end of speech is mostly
silence or a loop, which these checks detect much earlier. They do not detect gibberish, which sounds like speech.
"""

from collections import deque
from math import ceil, inf, log10

import numpy as np
from numpy.typing import NDArray

from deployments.protocol import Codes, FinishReason, Pcm

_WINDOW_S = 0.01
_FULL_SCALE = 32768
QUIET_DB = -50.0  # relative to full scale; anything quieter does not count as sound
_KEEP_S = 0.02  # seconds kept before the first sound, to preserve its attack
_MAX_TRIM_S = 10.0  # audio after this time is never trimmed


def first_sound(pcm: Pcm, sample_rate: int) -> int | None:
    """Return the index, in samples, of the first window louder than QUIET_DB; None if there is no such window."""
    window = _window(sample_rate)
    num_windows = len(pcm) // window
    windows = pcm[: num_windows * window].reshape(num_windows, window).astype(np.float32)
    power = (_FULL_SCALE * 10 ** (QUIET_DB / 20)) ** 2
    loud = np.flatnonzero(np.square(windows).mean(axis=1) > power)
    return int(loud[0]) * window if len(loud) else None


def _window(sample_rate: int) -> int:
    return max(1, round(_WINDOW_S * sample_rate))


class FirstSound:
    """Detector for the first sound in a stream that arrives in chunks."""

    def __init__(self, sample_rate: int) -> None:
        self._sample_rate, self._window = sample_rate, _window(sample_rate)
        self._rest: Pcm = np.zeros(0, np.int16)  # samples in an incomplete window
        self._num_quiet = 0  # samples before `_rest`
        self._is_found = False

    def feed(self, pcm: Pcm) -> float | None:
        """Return the seconds before the first sound, once, for the chunk that contains that sound; otherwise None."""
        if self._is_found:
            return None
        pcm = np.concatenate((self._rest, pcm))
        onset = first_sound(pcm, self._sample_rate)
        if onset is None:
            complete = len(pcm) // self._window * self._window
            self._rest, self._num_quiet = pcm[complete:], self._num_quiet + complete
            return None
        self._is_found = True
        return (self._num_quiet + onset) / self._sample_rate


class LeadingSilence:
    """Filter that trims the leading silence of one stream. Positions elsewhere use the codec's untrimmed timeline."""

    def __init__(self, sample_rate: int) -> None:
        self._sample_rate, self._window = sample_rate, _window(sample_rate)
        self._keep = ceil(_KEEP_S * sample_rate / self._window) * self._window
        self._max_trim = round(_MAX_TRIM_S * sample_rate)
        self._held: Pcm | None = np.zeros(0, np.int16)  # quiet samples that may yet be kept; None after the first sound
        self._num_dropped = 0

    def trim(self, pcm: Pcm) -> Pcm:
        """Return the samples to send: none until a window is louder than QUIET_DB, then all of them."""
        if self._held is None:
            return pcm
        pcm = np.concatenate((self._held, pcm))
        onset = first_sound(pcm, self._sample_rate)
        give_up = self._max_trim - self._num_dropped
        if onset is None and len(pcm) < give_up:
            self._hold_end(pcm)
            return pcm[:0]
        self._held = None
        start = give_up if onset is None else min(max(0, onset - self._keep), give_up)
        return pcm[start:]

    def _hold_end(self, pcm: Pcm) -> None:
        unfinished = len(pcm) % self._window
        dropped = max(0, len(pcm) - unfinished - self._keep)
        self._held = pcm[dropped:]
        self._num_dropped += dropped


# Longer speech cannot belong to the text, because no voice needs a second per token.
_LONGEST_TOKEN_S = 0.96
_LEAST_S = 6.0
# A text has been spoken by half of this limit, unless the voice is slow. The released checkpoints' voices take a
# quarter to half a second per token.
_EXPECTED = 0.5
# Speech that takes less time per token has left out text.
_SHORTEST_TOKEN_S = 0.04
# How long speech may be silent or repeat itself before it counts as over: before and after the expected end.
_PATIENCE_S, LATE_PATIENCE_S = 8.0, 3.0
_FULL_SCALE_DB = 20 * log10(32768)
_PAUSE_DB = 30.0  # below the loudest frame heard
_MURMUR_DB, _STEADY_DB = (
    12.0,
    4.0,
)  # noise is at least the first value below the loudest frame, and varies by at most the second value
# The longest period of a loop. Two repeats make a loop. One frame that differs cancels _ODD_FRAME repeated frames.
_LONGEST_LOOP_S = 3.2
_REPEATS = 2
_ODD_FRAME = 4
_UNKNOWN = -1  # code for a frame that this replica did not decode


def frames_of(seconds: float, frame_s: float) -> int:
    """Return how many frames of `frame_s` seconds are needed to cover `seconds`."""
    return ceil(seconds / frame_s - 1e-6)


def runaway_frames(num_text_tokens: int, frame_s: float) -> int:
    """Return the maximum number of frames that speech can take for a text of `num_text_tokens` tokens."""
    return frames_of(max(num_text_tokens * _LONGEST_TOKEN_S, _LEAST_S), frame_s)


class _Loops:
    """Counter, for each possible period, of frames whose codebook 0 equals that of the frame one period before."""

    def __init__(self, longest: int) -> None:
        """Create counters for periods of 1 to `longest` frames."""
        self._codes = np.full(longest, _UNKNOWN)  # the most recently counted frames, oldest first
        self._repeated = np.zeros(longest, np.int64)
        self._needed = _REPEATS * np.arange(1, longest + 1)
        self._most = 0  # largest value in `_repeated`
        self._coming: list[tuple[int, bool]] = []  # frames not yet counted in `_repeated`, and whether they count

    def add(self, code: int, *, counts: bool) -> None:
        """Add the next frame's code. A frame with `counts` False, as in a pause, neither extends nor breaks a loop."""
        self._coming.append((code, counts))

    def has_lasted(self, frames: int) -> bool:
        if self._most + len(self._coming) < frames:  # each frame adds at most one repeat
            return False
        self._count()
        return bool((self._repeated >= np.maximum(frames, self._needed)).any())

    def _count(self) -> None:
        """Count all new frames at once, because a batch of a hundred costs as much as five separate frames."""
        codes, counts = (np.array(column) for column in zip(*self._coming, strict=True))
        self._coming.clear()
        longest = len(self._codes)
        history = np.concatenate((self._codes, codes))
        before = np.lib.stride_tricks.sliding_window_view(history[:-1], longest)[:, ::-1]  # [frames, periods]
        earned = np.where(before == codes[:, None], 1, -_ODD_FRAME)
        earned[~counts] = 0
        sums = np.cumsum(np.vstack((self._repeated, earned)), axis=0)  # `_repeated` before clamping at zero
        self._repeated = sums[-1] - np.minimum(sums.min(axis=0), 0)
        self._most = int(self._repeated.max())
        self._codes = history[-longest:]


class EndingGuard:
    """Finds the frame at which a stream has to end. Pauses within speech are ignored."""

    def __init__(self, frame_samples: int, sample_rate: int, *, position: int = 0) -> None:
        """Start after `position` samples of the stream, which another replica has delivered."""
        self._frame_samples, self._frame_s = frame_samples, frame_samples / sample_rate
        self._patience, self._late_patience = (frames_of(s, self._frame_s) for s in (_PATIENCE_S, LATE_PATIENCE_S))
        self._num_frames = self._began = position // frame_samples
        self._levels: deque[float] = deque(maxlen=self._late_patience)  # dB of full scale
        self._loudest, self._num_quiet = QUIET_DB, 0
        self._loops = _Loops(frames_of(_LONGEST_LOOP_S, self._frame_s))

    def truncate(
        self, codes: Codes, pcm: Pcm, finish_reason: FinishReason | None, num_text_tokens: int
    ) -> tuple[Codes, Pcm, FinishReason | None]:
        """Return the part of the arguments that is speech.

        The last frames of `pcm` have `codes` [frames, groups]. The finish reason is set if the speech has to end.
        """
        size = self._frame_samples
        ends = range(len(pcm) % size or size, len(pcm) + 1, size)
        unknown = [_UNKNOWN] * (len(ends) - len(codes))
        expected = _EXPECTED * runaway_frames(num_text_tokens, self._frame_s)
        samples, begin = pcm.astype(np.float32), 0
        for end, code in zip(ends, [*unknown, *codes[:, 0].tolist()], strict=True):
            self._hear(samples[begin:end], code)
            reason = self._over(expected)
            if reason is not None:
                return codes[: max(0, len(codes) - (len(pcm) - end) // size)], pcm[:end], reason
            begin = end
        is_early = finish_reason is FinishReason.STOP and self._is_early(num_text_tokens)
        return codes, pcm, FinishReason.EARLY if is_early else finish_reason

    def _is_early(self, num_text_tokens: int) -> bool:
        """Return whether there are still too few frames for the text."""
        is_silent = self._loudest <= QUIET_DB and self._began == 0
        return is_silent or self._num_frames < num_text_tokens * (_SHORTEST_TOKEN_S / self._frame_s)

    def _hear(self, samples: NDArray[np.float32], code: int) -> None:
        level = _level_db(samples)
        self._num_frames += 1
        self._levels.append(level)
        self._loudest = max(self._loudest, level)
        is_quiet = level <= max(QUIET_DB, self._loudest - _PAUSE_DB)
        self._num_quiet = self._num_quiet + 1 if is_quiet else 0
        self._loops.add(code, counts=not is_quiet and code != _UNKNOWN)

    def _over(self, expected: float) -> FinishReason | None:
        """Return why the speech is over, or None. `expected` is the number of frames that the text should take."""
        is_late = self._num_frames - expected >= self._late_patience
        patience = self._late_patience if is_late else self._patience
        if self._num_quiet >= patience or (is_late and self._is_murmur()):
            return FinishReason.SILENCE
        return FinishReason.LOOP if self._loops.has_lasted(patience) else None

    def _is_murmur(self) -> bool:
        """Return whether recent audio is noise too steady to be speech, such as the room noise of a recording."""
        if len(self._levels) < self._late_patience:
            return False
        loudest = max(self._levels)
        return loudest <= self._loudest - _MURMUR_DB and loudest - min(self._levels) <= _STEADY_DB


def _level_db(samples: NDArray[np.float32]) -> float:
    power = float(samples @ samples) / max(1, len(samples))
    return 10 * log10(power) - _FULL_SCALE_DB if power else -inf
