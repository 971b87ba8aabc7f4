"""The settings `api.jobs`."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, model_validator

from deployments.config import Strict
from serve_app.config import PoolConfig, Positive, PositiveSeconds, host_name


class JobSettings(Strict):
    """Jobs, which are kept in the voice store (docs/jobs.md)."""

    max_jobs: Positive = 100  # maximum number of stored jobs of one owner
    max_input_chars: Positive = 200_000  # maximum length of a part, about three hours of speech
    max_bytes: Positive = 10 << 30  # storage of one owner. An hour of speech takes about 80 MB
    retention_s: PositiveSeconds = 7 * 86400.0  # time from the end of a job to its deletion
    pool: PoolConfig = PoolConfig(num_cpus=0.1, max_queued_requests=256)  # the one replica that runs jobs
    # Hosts that the `webhook` of a job may name.
    webhook_hosts: tuple[Annotated[str, AfterValidator(host_name)], ...] = ()
    # File with the secret that signs webhook calls, on the node of the job replica: 24 to 64 bytes in base64.
    webhook_secret_file: Path | None = None

    @model_validator(mode="after")
    def _one_replica_signs_its_calls(self) -> Self:
        if self.webhook_hosts and self.webhook_secret_file is None:
            raise ValueError("webhook_hosts: name the file of a secret in webhook_secret_file")
        if self.pool.replicas != 1:
            raise ValueError("pool.replicas: exactly one replica makes jobs")
        return self
