"""Ray Serve deployment whose single replica runs jobs. The store keeps all results, so the replica can be replaced."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from ray import serve

from deployments.serving import ray_metrics, ray_private
from serve_app.audio import recordings
from serve_app.config import ApiSettings
from serve_app.extensions.jobs.job_manager import JobManager
from serve_app.extensions.jobs.planning import resolver_of_jobs
from serve_app.extensions.jobs.segment_maker import SegmentMaker
from serve_app.extensions.records.extension import record_keeper
from serve_app.extensions.records.settings import RecordSettings
from serve_app.extensions.voices.extension import open_voices
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.ingress import forget_everywhere, limit_kept_memory, return_memory
from serve_app.scaling.pool_watch import PoolWatch
from serve_app.speech.model_state import ModelStatus
from serve_app.speech.replica_synthesizer import Deployed, ReplicaSynthesizer
from serve_app.speech.speech_models import SpeechModel, SpeechModels

_POLL_S = 0.25


class JobsReplica:
    """Deployment class for the single replica that synthesizes job segments."""

    def __init__(self, settings: ApiSettings, models: Sequence[Deployed], waking: Sequence[str]) -> None:
        """`models` is the same list that the ingress has. `waking` names the models whose talkers a job may start."""
        ray_metrics.install()
        app_name = serve.get_replica_context().app_name
        self._waking = waking
        self._watch = PoolWatch(app_name, {model.name: model.deployments for model in models})
        # If the only ingress replica is killed during a deletion, this process notifies the other replicas instead.
        forget = partial(forget_everywhere, app_name)
        self._voices = open_voices(settings.of(VoiceSettings), num_nodes=ray_private.num_nodes(), forget=forget)
        synthesizers = {model.name: ReplicaSynthesizer(model) for model in models}
        speaking = {name: SpeechModel(synthesizer, settings.admission) for name, synthesizer in synthesizers.items()}
        resolver = resolver_of_jobs(SpeechModels(speaking), settings, self._voices)
        replica, folder = ray_private.replica_name(), ray_private.log_folder()
        self._keeper = record_keeper(settings.of(RecordSettings), self._voices.store, replica=replica, folder=folder)
        maker = SegmentMaker(synthesizers, self._voices, self._keeper.receive)
        dead_nodes = ray_private.num_dead_nodes
        self._manager = JobManager(resolver, self._voices, maker, hindrance=self._hindrance, dead_nodes=dead_nodes)
        self._replica = ray_private.this_replica()
        limit_kept_memory()
        self._working: asyncio.Task[None] | None = None

    def __del__(self) -> None:
        """Close the records. Serve calls `__del__` before it ends the process."""
        if hasattr(self, "_keeper"):
            self._keeper.close()

    async def check_health(self) -> None:
        """Start working on jobs. Serve calls this method right after construction, and then periodically."""
        self._voices.follow()
        await asyncio.to_thread(return_memory)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())

    async def call(self, method: str, *arguments: object) -> Any:
        """Call the named method of the job manager and return its result."""
        self._manager.is_stopping = self._is_stopping
        return await getattr(self._manager, method)(*arguments)

    async def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop cached data for deleted stored voices from this process. Return the number of items dropped."""
        return recordings.forget(voices)

    async def _work(self) -> None:
        """Synthesize segments until Serve stops this replica. The replica that replaces it then continues."""
        running = asyncio.create_task(self._manager.run())
        try:
            while not running.done() and not self._is_stopping:
                await asyncio.wait((running,), timeout=_POLL_S)
        finally:
            running.cancel()
            await asyncio.wait((running,))
        if not running.cancelled():
            running.result()

    @property
    def _is_stopping(self) -> bool:
        return self._replica is not None and ray_private.is_stopping(self._replica)

    def _hindrance(self, model: str) -> str | None:
        state = self._watch.state(model)
        if state.status is ModelStatus.AT_ZERO and model not in self._waking:
            return "The model has no talkers, and talker_scaling.jobs does not let jobs start any. Live requests do."
        return None
