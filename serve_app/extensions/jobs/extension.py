import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deployments.errors import ReplicaLost, Starting
from serve_app.config import AppConfig
from serve_app.extension import DeploymentSpec, Extension, OpenContext
from serve_app.extensions.jobs import job_routes
from serve_app.extensions.jobs.job_routes import JobsClient
from serve_app.extensions.jobs.settings import JobSettings

if TYPE_CHECKING:
    from serve_app.speech.replica_synthesizer import Deployed

_REQUESTS = 256  # concurrent calls to the job replica; each call is short
# Creating a job takes longer than other calls, because the replica checks every text of a long book.
_TIMEOUT_S, _CREATE_TIMEOUT_S = 10.0, 120.0


def deploy(config: AppConfig, models: "Sequence[Deployed]") -> DeploymentSpec:
    """Return the deployment of the single replica that runs jobs."""
    scaling = {name: own.talker_scaling for name, own in config.by_model().items()}
    waking = tuple(name for name, own in scaling.items() if own is None or own.jobs == "wake")
    return DeploymentSpec(
        "Jobs",
        "serve_app.extensions.jobs.deployment:JobsReplica",
        config.api.of(JobSettings).pool,
        _REQUESTS,
        (config.api, models, waking),
    )


def open_client(context: OpenContext) -> JobsClient | None:
    """Return a function that calls the job manager of the job replica, or None if there is no such replica."""
    from deployments.serving.handles import call_replica  # imports Ray

    if (handle := context.handle) is None:
        return None

    async def ask(method: str, *arguments: object) -> Any:
        try:
            calling = call_replica(handle, "call", method, *arguments, lost=ReplicaLost)
            return await asyncio.wait_for(calling, _CREATE_TIMEOUT_S if method == "create" else _TIMEOUT_S)
        except TimeoutError:
            raise Starting("The job replica is starting and does not respond yet.", 1.0) from None

    return ask


EXTENSION = Extension(
    "jobs",
    settings=JobSettings,
    requires=("voices", "records", "models", "word_times"),
    dialects=(job_routes.DIALECT,),
    deploy=deploy,
    open=open_client,
)
