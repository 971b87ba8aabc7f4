"""The settings `api.jobs`."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, model_validator

from deployments.config import Strict
from serve_app.config import PoolConfig, Positive, PositiveSeconds, host_name


class JobSettings(Strict):
    """Long work (docs/jobs.md). Jobs lie in the store of voices."""

    max_jobs: Positive = 100  # kept of each owner
    max_input_chars: Positive = 200_000  # of a part: about three hours
    max_bytes: Positive = 10 << 30  # of each owner's finished segments: an hour of speech takes about 80 MB
    retention_s: PositiveSeconds = 7 * 86400.0  # from a job's end until it is removed
    pool: PoolConfig = PoolConfig(num_cpus=0.1, max_queued_requests=256)  # of the one replica that makes them
    # Hosts that a job's `webhook` may name, and the file with the secret that signs the calls, on the node of the pool
    # `Jobs`: the base64 of 24 to 64 bytes.
    webhook_hosts: tuple[Annotated[str, AfterValidator(host_name)], ...] = ()
    webhook_secret_file: Path | None = None

    @model_validator(mode="after")
    def _one_replica_signs_its_calls(self) -> Self:
        if self.webhook_hosts and self.webhook_secret_file is None:
            raise ValueError("webhook_hosts: name the file of a secret in webhook_secret_file")
        if self.pool.replicas != 1:
            raise ValueError("pool.replicas: exactly one replica makes jobs")
        return self
