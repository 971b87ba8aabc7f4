"""The complete application with pools that can lose replicas, and functions that kill replicas."""

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from deployments.config import CodecConfig, TalkerConfig
from serve_app.cli.serve.local_server import APP_NAME, Report
from serve_app.config import AdmissionSettings, ApiSettings, AppConfig, PoolConfig
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from tools.suites.application import running
from tools.suites.processes import MARK, marked

TALKER, CODEC = "Talker", "Codec"
ENGINE = "deployments.talker.process.engine_process"
DECODER = "deployments.codec.pool.worker_process"
_READY_S = 300.0  # time limit, for a busy machine


def tiny_model(directory: Path, kind: str = "CustomVoice") -> Path:
    """Write a tiny random checkpoint, unless it exists."""
    if not (directory / "config.json").exists():
        write_checkpoint(directory, SHAPES[f"tiny-{kind}"], Options(dtype=torch.float32))
    return directory


def config(model: Path, *, talkers: int = 2, codecs: int = 2) -> AppConfig:
    """Return pools whose replicas use fractions of a core, so two cores run all of them."""
    pool = PoolConfig(num_cpus=0.1, max_queued_requests=256)
    return AppConfig(
        model=str(model),
        api=ApiSettings(admission=AdmissionSettings(max_late_s=100)),  # these tests cause pauses
        talker=TalkerConfig(max_num_seqs=16, max_num_waiting=64),
        codec=CodecConfig(),
        ingress_pool=PoolConfig(num_cpus=0.1, max_queued_requests=256),
        codec_pool=pool.model_copy(update={"replicas": codecs}),
        talker_pool=pool.model_copy(update={"replicas": talkers}),
    )


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@dataclass(frozen=True, slots=True)
class Service:
    """Running application."""

    url: str
    mark: str
    app: AppConfig

    def processes(self, name: str) -> list[int]:
        """Return the processes of a deployment's replicas, or engine processes, including starting ones."""
        return self.processes_titled(name if name == ENGINE else f"ServeReplica:{APP_NAME}:{name}")

    def processes_titled(self, title: str) -> list[int]:
        """Return the processes whose command line contains `title`."""
        return [process for process, command in marked(self.mark).items() if title in command]

    def decoders(self) -> list[int]:
        """Return the processes in which codec replicas decode, without the processes that fork them."""
        decoders = self.processes_titled(DECODER)
        return [process for process in decoders if parent(process) in decoders]

    def num_running(self, name: str) -> int:
        """Return the number of running replicas, or zero while Serve reads a new configuration."""
        deployment = serve.status().applications[APP_NAME].deployments.get(name)
        return deployment.replica_states.get("RUNNING", 0) if deployment else 0

    def wait_for(self, name: str, replicas: int) -> None:
        """Return once `replicas` replicas run and no process of a dead replica remains."""
        deadline_s = time.monotonic() + _READY_S
        while self.num_running(name) < replicas or len(self.processes(name)) < replicas:
            assert time.monotonic() < deadline_s, f"{name} has {self.num_running(name)} replicas, not {replicas}"
            time.sleep(0.1)

    def replaces(self, replicas: list[int], pool: str, victim: int) -> None:
        """Return once one of the pool's `replicas` is gone. Kills `victim` now if it is still alive."""
        with contextlib.suppress(ProcessLookupError):
            if victim in marked(self.mark):
                os.kill(victim, signal.SIGKILL)
        deadline_s = time.monotonic() + _READY_S
        while {*replicas} <= {*self.processes(pool)}:
            assert time.monotonic() < deadline_s, f"all replicas of {pool} are still there"
            time.sleep(0.1)

    def kill(self, process: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one of the application's processes."""
        assert process in marked(self.mark)
        os.kill(process, number)


def redeploy(app: AppConfig, replicas: dict[str, int]) -> None:
    """Deploy like a config file. A different `app` is rolled out under load; pools are scaled."""
    application = {
        "name": APP_NAME, "route_prefix": "/", "import_path": "serve_app.app:build_app",
        "args": app.model_dump(mode="json"),
        "deployments": [{"name": name, "num_replicas": count} for name, count in replicas.items()],
    }  # fmt: skip
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


@contextlib.contextmanager
def serving(app: AppConfig, report: Report = lambda line: None) -> Iterator[Service]:
    """Run the application on a free port and end all its processes. `report` receives start-up messages."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    try:
        with running(app, report=report) as url:
            yield Service(url, mark, app)
    finally:
        del os.environ[MARK]
