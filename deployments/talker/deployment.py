"""The talker as a Ray Serve deployment: a thin shell around the engine process."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np

from deployments.config import TalkerConfig
from deployments.errors import TalkerLost
from deployments.handles import with_beats
from deployments.protocol import FrameChunk, GenerateRequest, ModelInfo
from deployments.talker.engine_client import EngineClient


class Talker:
    """One replica of the GPU pool. It is ready once its engine process has loaded the model and warmed up."""

    def __init__(self, model: str, config: TalkerConfig) -> None:
        self._engine = EngineClient(model, config)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[FrameChunk]:
        """Frames of one utterance; raises InvalidRequest, Overloaded or TalkerLost. Leaving it frees the sequence.

        Chunks that hold nothing are signs of life.
        """
        async with aclosing(with_beats(self._engine.generate(request), self._beat)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _beat(self) -> FrameChunk:
        return FrameChunk(np.zeros((0, self._engine.info.num_code_groups), np.int16), 0)

    async def describe(self) -> ModelInfo:
        """The loaded checkpoint."""
        return self._engine.info

    async def load(self) -> tuple[int, int]:
        """Sequences that run, and sequences that wait."""
        return self._engine.num_running, self._engine.num_waiting

    def check_health(self) -> None:
        """Serve replaces the replica when this raises: a dead engine cannot be revived in place."""
        if not self._engine.is_alive:
            raise TalkerLost("the engine process has ended")

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()
