"""Speaking speed without a change of pitch, by FFmpeg's atempo."""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray


class Tempo:
    """Plays s16le mono PCM `speed` times as fast, as it comes; the result does not depend on how the input is cut."""

    def __init__(self, speed: float, sample_rate: int) -> None:
        from av.filter import Graph

        self._sample_rate = sample_rate
        self._num_samples = 0
        self._graph = Graph()
        source = self._graph.add_abuffer(
            sample_rate=sample_rate, format="s16", layout="mono", time_base=Fraction(1, sample_rate)
        )
        steps = [self._graph.add("atempo", repr(factor)) for factor in factors(speed)]
        sink = self._graph.add("abuffersink")
        self._graph.link_nodes(source, *steps, sink).configure()

    def stretch(self, pcm: bytes) -> bytes:
        """The stretched audio that `pcm` makes available; may be empty."""
        samples = np.frombuffer(pcm, "<i2")[np.newaxis]
        # atempo holds back about as much as the frame it was given: short frames keep a long chunk from waiting.
        step = self._sample_rate // 50
        return b"".join([self._push(samples[:, start : start + step]) for start in range(0, samples.shape[1], step)])

    def close(self) -> bytes:
        """What was held back."""
        self._graph.push(None)
        return self._pull()

    def _push(self, samples: NDArray[np.int16]) -> bytes:
        from av import AudioFrame

        frame = AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.pts = self._sample_rate, self._num_samples
        self._num_samples += samples.shape[1]
        self._graph.push(frame)
        return self._pull()

    def _pull(self) -> bytes:
        from av import AudioFrame, error

        stretched = bytearray()
        while True:
            try:
                frame = self._graph.pull()
            except (error.BlockingIOError, error.EOFError):
                return bytes(stretched)
            assert isinstance(frame, AudioFrame)
            stretched += frame.to_ndarray().astype("<i2", copy=False).tobytes()


def factors(speed: float) -> list[float]:
    """`speed` as atempo steps: one skips samples above 2 and does not go below 0.5, so two share what is beyond."""
    return [speed] if 0.5 <= speed <= 2 else [speed**0.5] * 2
