"""Ray's autoscaling test cluster: nodes that the autoscaler adds and removes are processes of this machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FakeMultiNodeProvider
from ray.cluster_utils import AutoscalingCluster

from serve_app.cli.ray_settings import free_port, free_ports
from tools.suites.processes import MARK, marked

_EMPTY = [
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude",
    "rsync_filter",
]  # fmt: skip
_KILL_S = 10


class FakeNodes(AutoscalingCluster):
    """The wheel lacks the file with the cluster's defaults, and its start ends every Ray on the machine: not ours."""

    def __init__(self, folder: Path, head: Mapping[str, float], workers: Mapping[str, Any]) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._folder = folder
        super().__init__(dict(head), dict(workers), autoscaler_v2=True)

    def _generate_config(
        self, head_resources: dict[str, float], worker_node_types: dict[str, Any], **_: object
    ) -> dict[str, Any]:
        head = {"resources": head_resources, "node_config": {}, "max_workers": 0}
        provider = {
            "type": "external",  # under its own name Ray looks for the file that the wheel lacks
            "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
            "gcs_address": self.address, "head_node_id": FAKE_HEAD_NODE_ID, "launch_multiple": True,
        }  # fmt: skip
        return {
            "cluster_name": "fake", "provider": provider, "head_node_type": "ray.head.default",
            "available_node_types": {**worker_node_types, "ray.head.default": head},
            "max_workers": 4, "upscaling_speed": 10.0, "idle_timeout_minutes": 0.1, "auth": {}, "docker": {},
            "file_mounts": {}, "file_mounts_sync_continuously": False, **{name: [] for name in _EMPTY},
        }  # fmt: skip

    def start(self) -> None:
        """Start the head node; `RAY_FAKE_CLUSTER` and the like must stand in its environment."""
        file = self._folder / "cluster.json"
        file.write_text(json.dumps(self._config), encoding="utf-8")
        host, port = self.address.split(":")
        names = "ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port"
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        subprocess.run(
            [
                *(str(Path(sys.executable).with_name("ray")), "start", "--head", f"--node-ip-address={host}"),
                *(f"--port={port}", f"--autoscaling-config={file}", f"--temp-dir={self._folder}"),
                *(f"--num-cpus={self._head_resources['CPU']:g}", "--include-dashboard=false"),
                *(f"--{name}={number}" for name, number in ports.items()),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )


@contextlib.contextmanager
def fake_cluster(folder: Path, head: Mapping[str, float], workers: Mapping[str, Any]) -> Iterator[None]:
    """This process is connected to the cluster. No process of it is left behind."""
    run_id = folder.name
    environment = {
        MARK: run_id, "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }  # fmt: skip
    cluster = FakeNodes(folder, head, workers)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            cluster.start()
        ray.init(cluster.address, log_to_driver=False, logging_level="warning")
        yield
    finally:
        ray.shutdown()
        _kill(run_id)


def _kill(run_id: str) -> None:
    until_s = time.monotonic() + _KILL_S
    while processes := marked(run_id):
        assert time.monotonic() < until_s, processes
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def nodes() -> dict[str, int]:
    """Living nodes by the kind of resource that they bring."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return {"all": len(alive), "gpu": sum("GPU" in resources for resources in alive)}
