"""Settings below `api.jobs`."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, model_validator

from deployments.config import Strict
from serve_app.config import PoolConfig, Positive, PositiveSeconds, host_name


class JobSettings(Strict):
    """Settings of jobs (docs/jobs.md). Jobs are kept in the voice store."""

    max_jobs: Positive = 100  # maximum number of stored jobs per owner
    max_input_chars: Positive = 200_000  # maximum length of a part; the default is about three hours of speech
    max_bytes: Positive = 10 << 30  # maximum storage per owner; an hour of speech takes about 80 MB
    retention_s: PositiveSeconds = 7 * 86400.0  # time between the end of a job and its deletion
    pool: PoolConfig = PoolConfig(num_cpus=0.1, max_queued_requests=256)  # resources of the only job replica
    # Hosts to which the `webhook` of a job may point.
    webhook_hosts: tuple[Annotated[str, AfterValidator(host_name)], ...] = ()
    # File on the node of the job replica with the secret that signs webhook calls: 24 to 64 bytes in base64.
    webhook_secret_file: Path | None = None

    @model_validator(mode="after")
    def _one_replica_signs_its_calls(self) -> Self:
        if self.webhook_hosts and self.webhook_secret_file is None:
            raise ValueError("webhook_hosts requires a signing secret. Set webhook_secret_file to its file")
        if self.pool.replicas != 1:
            raise ValueError("pool.replicas must be 1, because exactly one replica runs jobs")
        return self
