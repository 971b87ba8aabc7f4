"""How long the answers are, for servers that can be told: random weights would otherwise never stop, or at once."""

from dataclasses import dataclass

import numpy as np

FRAMES_PER_S = 12.5  # of Qwen3-TTS's codec: 80 ms each
MIN_S, MAX_S = 0.8, 30.0


@dataclass(frozen=True, slots=True)
class SpeechLengths:
    """Log-normal durations of speech: `median_s`, and `sigma`, the standard deviation of their logarithm."""

    median_s: float
    sigma: float

    def draw(self, count: int, *, seed: int) -> list[int]:
        """Frames of `count` answers, each between MIN_S and MAX_S."""
        generator = np.random.default_rng((seed, 1))
        drawn_s = generator.lognormal(np.log(self.median_s), self.sigma, size=count)
        frames: list[int] = np.rint(np.clip(drawn_s, MIN_S, MAX_S) * FRAMES_PER_S).astype(int).tolist()
        return frames


def length_fields(frames: int | None) -> dict[str, object]:
    """Body fields that make an answer exactly this long (a Talkray extension that other engines share in part).

    The last of `max_new_tokens` steps writes no frame: it would be the end.
    """
    return {} if frames is None else {"max_new_tokens": frames + 1, "ignore_eos": True}
