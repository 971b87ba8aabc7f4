"""How much of a stream the talker's GPU decodes."""

from collections.abc import Iterator
from contextlib import contextmanager

from deployments.config import CodecConfig
from deployments.protocol import ALL_FRAMES

# A pool that is this busy falls behind with the next burst: further streams stay on the GPU.
_FULL = 0.9


class Placement:
    """Counts the streams that this replica decodes, and asks the GPU for what they leave no time for."""

    def __init__(self, config: CodecConfig, *, frame_s: float) -> None:
        self._config, self._frame_s = config, frame_s
        self._streams = 0  # decoded here
        self.talker_on_gpu = False  # known once a talker has been asked

    @contextmanager
    def admit(self, seconds_per_frame: float) -> Iterator[int]:
        """A stream for as long as it lasts; how many frames to ask the GPU for. A worker takes `seconds_per_frame`."""
        gpu_frames = self._gpu_frames(seconds_per_frame)
        here = gpu_frames < ALL_FRAMES
        self._streams += here
        try:
            yield gpu_frames
        finally:
            self._streams -= here

    def _gpu_frames(self, seconds_per_frame: float) -> int:
        """An idle pool takes over behind `gpu_frames`; the busier, the later; a full one never does."""
        placement = self._config.placement
        if placement == "inline":
            return ALL_FRAMES
        if placement == "pool" or not self.talker_on_gpu:
            return 0
        busy = (self._streams + 1) * seconds_per_frame / self._frame_s / self._config.workers
        return ALL_FRAMES if busy >= _FULL else round(self._config.gpu_frames / (1 - busy))
