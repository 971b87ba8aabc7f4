"""Several hosts on one machine: a raylet each, and the application spread over them."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from serve_app.cli.ray_settings import free_port
from serve_app.cli.serve.local_server import Address, _start_proxy, roll_out
from serve_app.config import AppConfig
from tools.suites.pools import Service
from tools.suites.processes import MARK, end_proxy, marked


@dataclass(slots=True)
class Hosts:
    """The hosts besides the head, where the listener is."""

    service: Service
    cluster: Cluster
    nodes: list[Any]  # ray._private.node.Node

    def processes(self, node: Any) -> dict[int, str]:
        """All that runs on a host, its raylet and everything below: command lines by process."""
        running, tree = marked(self.service.mark), {node.all_processes["raylet"][0].process.pid}
        while below := {process for process in running if process not in tree and _parent(process) in tree}:
            tree |= below
        return {process: running[process] for process in tree if process in running}

    def busiest(self) -> Any:
        return max(self.nodes, key=self.num_replicas)

    def kill(self, node: Any) -> int:
        """End a host and all its processes at once; the number of replicas that were there."""
        lost = self.num_replicas(node)
        for process in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)
        return lost

    def drain(self, node: Any, *, within_s: int) -> None:
        """What a spot notice does: the host will be gone in so many seconds."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.cluster.address]
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot notice"]
        deadline = ["--node-id", node.node_id, "--deadline-remaining-seconds", str(within_s)]
        subprocess.run([*command, *reason, *deadline], check=True, capture_output=True, text=True)

    def num_replicas(self, node: Any) -> int:
        """Replicas that have a process on a host."""
        return sum("ServeReplica" in command for command in self.processes(node).values())


def _parent(process: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return None


@contextlib.contextmanager
def serving_on_hosts(app: AppConfig, *, hosts: int, cpus: int) -> Iterator[Hosts]:
    """The application on a head with one logical core and `hosts` others with `cpus` each."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=cpus) for _ in range(hosts)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
    head = ray.get_runtime_context().get_node_id()
    address = Address("127.0.0.1", free_port())
    try:
        _start_proxy(address)
        roll_out(app, lambda line: None)
        yield Hosts(Service(address.url, mark, app), cluster, nodes)
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
        end_proxy(head)
        del os.environ[MARK]
