"""The talker as a Ray Serve deployment: a thin shell around the engine process."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from deployments.config import TalkerConfig
from deployments.errors import TalkerLost
from deployments.protocol import FrameChunk, GenerateRequest, ModelInfo
from deployments.talker.engine_client import EngineClient


class Talker:
    """One replica of the GPU pool. It is ready once its engine process has loaded the model and warmed up."""

    def __init__(self, model: str, config: TalkerConfig) -> None:
        self._engine = EngineClient(model, config)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[FrameChunk]:
        """Frames of one utterance; raises InvalidRequest, Overloaded or TalkerLost. Leaving it frees the sequence."""
        async with aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

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

    def check_health(self) -> None:
        """Serve replaces the replica when this raises: a dead engine cannot be revived in place."""
        if not self._engine.is_alive:
            raise TalkerLost("the engine process has ended")

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()
