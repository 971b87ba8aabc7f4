"""Ray Serve deployment of the talker, a thin wrapper around the engine process."""

import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, replace
from typing import Self

import numpy as np
from ray import serve

from deployments.autoscaling_records import TalkerRecord
from deployments.config import TalkerConfig
from deployments.errors import TalkerLost
from deployments.protocol import FrameChunk, ModelInfo, SynthesisRequest, with_mark
from deployments.serving import metrics, ray_metrics, ray_private
from deployments.serving.replica import Replica
from deployments.serving.reports import Start, report_stage, start_key
from deployments.talker.process.engine_client import EngineClient


class StartNotes:
    """Writes this replica's startup progress to the cluster's control store. Does nothing outside Serve."""

    def __init__(self) -> None:
        self._key: str | None = None
        if ray_private.this_replica() is not None:
            context = serve.get_replica_context()
            self._key = start_key(context.app_name, context.deployment)
        last = None if self._key is None else Start.read(ray_private.get_note(self._key))
        self._start = Start(time.time()) if last is None else last.next(time.time())

    def report(self, stage: str) -> None:
        report_stage(f"talker: {stage}")
        self._leave(replace(self._start, stage=stage))

    def __enter__(self) -> Self:
        self._leave(self._start)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(self._start.ended(time.time(), failed=None if error is None else str(error)))

    def sleep(self, is_asleep: bool) -> None:
        """Record whether the replica has released its GPU."""
        self._leave(replace(self._start, is_asleep=is_asleep))

    def _leave(self, start: Start) -> None:
        self._start = start
        if self._key is not None:
            ray_private.put_note(self._key, start.note())


class TalkerReplica:
    """One replica of a talker pool. It is ready once its engine process has loaded the model and warmed up."""

    def __init__(self, model: str, config: TalkerConfig, name: str, *, makes_audio: bool) -> None:
        """Start the engine. `name` labels metrics if there are several models. See `EngineClient` for `makes_audio`."""
        ray_metrics.install(name, pool="talker")
        with StartNotes() as notes:
            self._engine = EngineClient(model, config, notes.report, makes_audio=makes_audio)
        self._engine.on_sleep = notes.sleep
        self._watches_idleness = config.keep_alive_s is not None
        if makes_audio:
            metrics.PRECISION.record(1, pool="talker", precision=self._engine.info.codec_precision)
        failure = "the engine process of this talker replica has died"
        self._replica = Replica(TalkerLost, lambda: None if self._engine.is_alive else failure)
        no_codes = np.zeros((0, self._engine.info.num_code_groups), np.int16)
        self._heartbeat = FrameChunk(codes=no_codes, num_text_tokens=0)

    async def generate(self, request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        """Yield the frames of one segment. Closing the generator frees the sequence. Empty chunks are heartbeats.

        Raises InvalidRequest or Overloaded, and TalkerLost or Moved if another talker should continue.
        """
        request = with_mark(request, "to-talker")
        # This coroutine returns an async generator instead of being one, because an extra generator between Serve and
        # the chunks would add time to each chunk.
        return self._replica.with_heartbeats(self._engine.stream_frames(request), self._heartbeat, "from-engine")

    async def describe(self) -> ModelInfo:
        return self._engine.info

    async def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop cached results for stored voices (`RecordingCache.forget`). Returns the number of results dropped."""
        return await self._engine.forget(voices)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return a `TalkerRecord` for Serve's controller."""
        load = self._engine.load
        numbers = float(load.num_running), float(load.num_waiting), load.kv_used_ratio
        return asdict(TalkerRecord(*numbers, background=float(load.num_background)))

    async def check_health(self) -> None:
        """Raise an error so that Serve replaces the replica, because a dead engine cannot be restarted in place."""
        self._replica.check_health()
        if self._watches_idleness:  # also if the replica has not had any requests yet
            await self._engine.connect()

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()
