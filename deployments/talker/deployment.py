"""The talker as a Ray Serve deployment: a thin shell around the engine process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from deployments.config import TalkerConfig
from deployments.drain import Departure, end_process
from deployments.errors import TalkerLost
from deployments.handles import with_beats
from deployments.protocol import FrameChunk, GenerateRequest, ModelInfo, reached
from deployments.talker.engine_client import EngineClient


class Talker:
    """One replica of the GPU pool. It is ready once its engine process has loaded the model and warmed up."""

    def __init__(self, model: str, config: TalkerConfig) -> None:
        self._engine = EngineClient(model, config)
        self._departure = Departure()
        self._ending: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[FrameChunk]:
        """Frames of one utterance; leaving it frees the sequence. Chunks that hold nothing are signs of life.

        Raises InvalidRequest and Overloaded; TalkerLost and Moved where another talker should go on.
        """
        request = replace(request, synthesis=reached(request.synthesis, "to-talker"))
        async with aclosing(with_beats(self._engine.generate(request), self._beat, self._check)) as chunks:
            async for chunk in chunks:
                yield reached(chunk, "from-engine")

    def _beat(self) -> FrameChunk:
        return FrameChunk(np.zeros((0, self._engine.info.num_code_groups), np.int16), 0)

    async def describe(self) -> ModelInfo:
        """The loaded checkpoint."""
        return self._engine.info

    async def load(self) -> tuple[int, int]:
        """Sequences that run, and sequences that wait."""
        return self._engine.num_running, self._engine.num_waiting

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The fields of `serve_app.autoscaling.TalkerRecord`, for Serve's controller."""
        engine = self._engine
        return {
            "running": float(engine.num_running),
            "waiting": float(engine.num_waiting),
            "kv_used_ratio": engine.kv_used_ratio,
        }

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises, or when it ends: a dead engine cannot be revived in place."""
        self._check_engine()

    def _check(self) -> None:
        self._check_engine()
        self._departure.check()

    def _check_engine(self) -> None:
        if self._engine.is_alive:
            return
        self._ending = self._ending or asyncio.create_task(end_process("its engine process is lost"))
        raise TalkerLost("the engine process of this talker replica is lost")

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()
