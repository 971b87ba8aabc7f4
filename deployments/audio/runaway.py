"""Speech that does not end, or ends before its text was spoken: a talker has missed the end of speech.

A talker knows its codes only, and its own limit is far beyond the length of any text. After the end it mostly makes
silence or a loop, which is found here much earlier. Gibberish is not found: it sounds like speech.
"""

from collections import deque
from math import ceil, inf, log10

import numpy as np

from deployments.audio.silence import QUIET_DB, Pcm
from deployments.protocol import Codes, FinishReason

# Speech that is longer than its text can be: no voice needs a second for a token.
_LONGEST_TOKEN_S = 0.96
_LEAST_S = 6.0
# By half of that a text is spoken, unless slowly: voices take a quarter to half a second for a token of a released
# checkpoint.
_EXPECTED = 0.5
# Speech that is shorter for a token has left text out.
_SHORTEST_TOKEN_S = 0.04
# How long speech may be silent or repeat itself before it counts as over, and behind the expected end.
_PATIENCE_S, LATE_PATIENCE_S = 8.0, 3.0
_FULL_SCALE_DB = 20 * log10(32768)
_PAUSE_DB = 30.0  # below the loudest frame so far
_MURMUR_DB, _STEADY_DB = 12.0, 4.0  # noise is that much quieter than the loudest frame, and varies no more than that
# The longest period of a loop. A loop counts after two repeats. An odd frame costs as much as some equal frames earn.
_LONGEST_LOOP_S = 3.2
_REPEATS = 2
_ODD_FRAME = 4
_EARNED = np.array([-_ODD_FRAME, 1])
_UNKNOWN = -1  # code of a frame that was not asked for here


def frames_of(seconds: float, frame_s: float) -> int:
    """The fewest frames of `frame_s` that last so long."""
    return ceil(seconds / frame_s - 1e-6)


def runaway_frames(num_text_tokens: int, frame_s: float) -> int:
    """Frames behind which a text of so many tokens cannot still be spoken."""
    return frames_of(max(num_text_tokens * _LONGEST_TOKEN_S, _LEAST_S), frame_s)


class _Loops:
    """For each possible period: for how many frames codebook 0 has repeated what it was a period before."""

    def __init__(self, longest: int) -> None:
        """Periods have `longest` frames at most."""
        self._codes = np.full(longest, _UNKNOWN)  # of the latest frames, the newest first
        self._repeated = np.zeros(longest, np.int64)
        self._needed = _REPEATS * np.arange(1, longest + 1)

    def add(self, code: int, *, counts: bool) -> None:
        """The next frame's code. One that does not count, as in a pause, neither makes a loop nor breaks one."""
        if counts:
            self._repeated += _EARNED[(self._codes == code).view(np.int8)]
            np.maximum(self._repeated, 0, out=self._repeated)
        self._codes[1:] = self._codes[:-1]
        self._codes[0] = code

    def has_lasted(self, frames: int) -> bool:
        return bool((self._repeated >= np.maximum(frames, self._needed)).any())


class EndingGuard:
    """Listens to one stream, frame by frame, and says where it has to be ended. Pauses within speech are left alone."""

    def __init__(self, frame_samples: int, sample_rate: int, *, position: int = 0) -> None:
        """`position`: samples of the stream that were delivered elsewhere."""
        self._frame_samples, self._frame_s = frame_samples, frame_samples / sample_rate
        self._patience, self._late_patience = (frames_of(s, self._frame_s) for s in (_PATIENCE_S, LATE_PATIENCE_S))
        self._num_frames = self._began = position // frame_samples
        self._levels: deque[float] = deque(maxlen=self._late_patience)  # dB of full scale
        self._loudest, self._num_quiet = QUIET_DB, 0
        self._loops = _Loops(frames_of(_LONGEST_LOOP_S, self._frame_s))

    def pass_on(
        self, codes: Codes, pcm: Pcm, finish_reason: FinishReason | None, num_text_tokens: int
    ) -> tuple[Codes, Pcm, FinishReason | None]:
        """The next samples, whose last frames have `codes` [frames, groups], as far as they belong to the speech."""
        size = self._frame_samples
        ends = range(len(pcm) % size or size, len(pcm) + 1, size)
        unknown = [_UNKNOWN] * (len(ends) - len(codes))
        begin = 0
        for end, code in zip(ends, [*unknown, *codes[:, 0].tolist()], strict=True):
            self._hear(pcm[begin:end], code)
            reason = self._over(num_text_tokens)
            if reason is not None:
                return codes[: max(0, len(codes) - (len(pcm) - end) // size)], pcm[:end], reason
            begin = end
        is_early = finish_reason is FinishReason.STOP and self._is_early(num_text_tokens)
        return codes, pcm, FinishReason.EARLY if is_early else finish_reason

    def _is_early(self, num_text_tokens: int) -> bool:
        """Whether the frames so far cannot hold the text."""
        is_silent = self._loudest <= QUIET_DB and self._began == 0
        return is_silent or self._num_frames < num_text_tokens * (_SHORTEST_TOKEN_S / self._frame_s)

    def _hear(self, pcm: Pcm, code: int) -> None:
        level = _level_db(pcm)
        self._num_frames += 1
        self._levels.append(level)
        self._loudest = max(self._loudest, level)
        is_quiet = level <= max(QUIET_DB, self._loudest - _PAUSE_DB)
        self._num_quiet = self._num_quiet + 1 if is_quiet else 0
        self._loops.add(code, counts=not is_quiet and code != _UNKNOWN)

    def _over(self, num_text_tokens: int) -> FinishReason | None:
        expected = _EXPECTED * runaway_frames(num_text_tokens, self._frame_s)
        is_late = self._num_frames - expected >= self._late_patience
        patience = self._late_patience if is_late else self._patience
        if self._num_quiet >= patience or (is_late and self._is_murmur()):
            return FinishReason.SILENCE
        return FinishReason.LOOP if self._loops.has_lasted(patience) else None

    def _is_murmur(self) -> bool:
        """Whether it has been a noise for a while that is too even for speech, as of the room of a recording."""
        if len(self._levels) < self._late_patience:
            return False
        loudest = max(self._levels)
        return loudest <= self._loudest - _MURMUR_DB and loudest - min(self._levels) <= _STEADY_DB


def _level_db(pcm: Pcm) -> float:
    samples = pcm.astype(np.float32)
    power = float(samples @ samples) / max(1, len(samples))
    return 10 * log10(power) - _FULL_SCALE_DB if power else -inf
