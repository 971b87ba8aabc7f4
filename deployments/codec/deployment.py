"""Ray Serve deployment of the codec decoder, which reads frames from a talker and yields PCM."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.codec.plan import MAX_BATCH_SIZE
from deployments.codec.pool.capacity import CodecLoad
from deployments.config import CodecConfig, CodecPlacement
from deployments.errors import CodecLost, NotReady, Overloaded, TalkerLost
from deployments.protocol import FrameChunk, ModelInfo, PcmChunk, SynthesisRequest, with_mark
from deployments.serving import ray_metrics, ray_private
from deployments.serving.handles import call_replica, stream_from_replica
from deployments.serving.replica import Replica

if TYPE_CHECKING:  # do not import torch in processes that only compose the application
    from deployments.codec.batch import Decoded, DecodeTask

# How long a starting replica waits for a talker. By then, the route to the talker pool is known in any case.
_MEETING_S = 2.0
_HEARTBEAT = PcmChunk(pcm=b"", codes=np.zeros((0, 0), np.int16), num_text_tokens=0)


class CodecReplica:
    """One replica of the codec pool. The state of a stream is local to the generator that serves the stream.

    The replica decodes for all models with the same speech tokenizer as `model`. Each model has its own talker pool.
    """

    def __init__(
        self,
        model: str,
        config: CodecConfig,
        talkers: Mapping[str, DeploymentHandle],
        placements: Mapping[str, CodecPlacement],
        max_late_s: float,
        name: str = "",
    ) -> None:
        """Create a replica that calls `talkers`, the handle of each model by name.

        `placements` sets where each of several models is decoded. It is "pool" for talkers without a GPU, because a
        model with zero replicas cannot report whether its talkers have a GPU. `max_late_s` limits the silence that a
        listener may hear. `name` identifies one of several codec pools in metrics.
        """
        from deployments.codec.pool.service import CodecService

        ray_metrics.install(name, pool="codec")

        batched = serve.batch(
            max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=0, max_concurrent_batches=config.workers
        )

        @batched  # type: ignore[untyped-decorator]
        async def decode(tasks: "list[DecodeTask]") -> "list[Decoded | Exception]":
            """Decode chunks of several streams in one call.

            The gate selects the tasks of a call, because `serve.batch` ignores deadlines and shapes. The call still
            uses `serve.batch`, because it provides Serve's own batch metrics.
            """
            decoding = self._service.decode_batch(tasks)
            return await self._load.measure_call(decoding, tasks, waiting=self._service.gate.num_waiting)

        self._talkers = talkers
        self._service = CodecService(model, config, decode=decode, placements=placements)
        gate = self._service.gate
        self._load = CodecLoad(
            config.workers, frame_s=self._service.frame_s, max_late_s=max_late_s, worker_capacity=lambda: gate.capacity
        )
        self._knows_talker = "" not in self._talkers  # whether a single model's talkers have reported their device
        self._has_tried = False
        self._replica = Replica(CodecLost, lambda: self._service.failure)

    async def describe(self, model: str) -> ModelInfo:
        """Return the checkpoint's description from a replica of its talker pool. Waits for a replica."""
        info: ModelInfo = await call_replica(self._talkers[model], "describe", lost=TalkerLost)
        if not model:
            self._service.placement.talker_on_gpu = info.talker_on_gpu
            self._knows_talker = True
        return info

    async def synthesize(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        """Yield the audio of one segment, chunk by chunk, each with its codes.

        If a talker dies, another talker takes over. Raises InvalidRequest and Overloaded before the first audio,
        TalkerLost if no talker can continue, and CodecLost or Moved if another codec replica should continue. Empty
        chunks are heartbeats.
        """
        if not self._knows_talker:
            await self.describe("")
        request = with_mark(request, "to-codec")
        audio = self._load.track_stream(self._service.decode_stream, request, self._generate)
        return self._replica.with_heartbeats(audio, _HEARTBEAT, "codec")

    async def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop cached results of stored voices (`RecordingCache.forget`). Returns the number of dropped results."""
        return self._service.forget(voices)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return a `CodecRecord` for Serve's controller."""
        return asdict(self._load.record())

    async def check_health(self) -> None:
        """Raise an error so that Serve replaces the replica, because a hung thread cannot be stopped.

        A new replica accepts requests after the first call. That call sets up the route to the talkers, so streams do
        not have to wait for it; it takes seconds on a busy machine.
        """
        self._replica.check_health()
        if not self._has_tried:
            self._has_tried = True
            with suppress(TimeoutError, NotReady, Overloaded, TalkerLost):
                await asyncio.wait_for(self._meet(), _MEETING_S)

    async def _meet(self) -> None:
        """Query all talker pools in parallel. Skips pools that have zero replicas, because a call would start one."""
        if len(self._talkers) == 1:
            await asyncio.gather(*map(self.describe, self._talkers))
            return
        pools = await asyncio.to_thread(ray_private.pools, serve.get_replica_context().app_name)
        there = [name for name, handle in self._talkers.items() if pools[handle.deployment_name].wanted]
        await asyncio.gather(*map(self.describe, there), return_exceptions=True)

    def _generate(self, request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        return stream_from_replica(self._talkers[request.model], "generate", request, lost=TalkerLost)
