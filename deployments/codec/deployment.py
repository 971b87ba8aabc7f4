"""The codec decoder as a Ray Serve deployment: pulls frames from a talker, yields PCM."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.codec.load import CodecLoad
from deployments.config import CodecConfig
from deployments.errors import TalkerLost
from deployments.handles import call, stream
from deployments.protocol import FrameChunk, GenerateRequest, ModelInfo, PcmChunk, SynthesisRequest

if TYPE_CHECKING:  # torch stays out of processes that only compose the application
    from deployments.codec.batcher import Decoded, DecodeJob


class CodecDecoder:
    """One replica of the codec pool. A stream's state lives in its generator, on the replica that began it."""

    def __init__(self, model: str, config: CodecConfig, talker: DeploymentHandle) -> None:
        from deployments.codec.service import CodecService

        self._talker = talker
        self._service = CodecService(model, config, decode=self._decode)
        self._load = CodecLoad(config)
        self._decode.set_max_batch_size(config.max_batch_size)

    async def describe(self) -> ModelInfo:
        """The talker's checkpoint."""
        info: ModelInfo = await call(self._talker, "describe", lost=TalkerLost)
        return info

    async def synthesize(self, request: SynthesisRequest) -> AsyncIterator[PcmChunk]:
        """Audio of one utterance, chunk by chunk, each with its codes.

        Raises InvalidRequest and Overloaded before the first chunk, TalkerLost when the talker dies.
        """
        async with aclosing(self._load.stream(self._service.synthesize, request, self._generate)) as chunks:
            async for chunk in chunks:
                yield chunk

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The fields of `serve_app.autoscaling.CodecRecord`, for Serve's controller."""
        return self._load.record()

    async def batch_counts(self) -> tuple[int, int]:
        """Decode calls so far, and chunks decoded in them: their ratio is the mean batch."""
        return self._service.gate.batches, self._service.gate.jobs

    def _generate(self, request: GenerateRequest) -> AsyncGenerator[FrameChunk, None]:
        return stream(self._talker, "generate", request, lost=TalkerLost)

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0)  # type: ignore[untyped-decorator]
    async def _decode(self, jobs: "list[DecodeJob]") -> "list[Decoded | Exception]":
        """Chunks of several streams at once. The service's gate decides which come together."""
        decoding = self._service.decode_batch(jobs)
        return await self._load.call(decoding, [len(job.codes) for job in jobs], waiting=self._service.gate.num_waiting)
