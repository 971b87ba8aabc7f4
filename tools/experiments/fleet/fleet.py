"""A Ray cluster in namespaces that runs `cluster/serve/production.yaml` scaled down."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from serve_app.cli import ray_settings
from serve_app.cli.key_file import create_key
from serve_app.cli.serve.local_server import APP_NAME
from serve_app.direct import open_direct
from tools.experiments.fleet.namespaces import Machine, Network, network

ROOT = Path(__file__).parents[3]
TALKER, CODEC, INGRESS, JOBS = "Talker", "Codec", "Ingress", "Jobs"
TALKERS, CODECS = "talker", "codec"  # values of the label `pool`
HTTP_PORT, GCS_PORT, METRICS_PORT = 8000, 6379, 8080
START_S = 1200.0
KEYS = "keys.json"
SLOT_CPUS, PER_NODE = 0.25, 2  # CPUs per replica; two talkers per node, or two codec and two ingress replicas
_OBJECT_STORE = 80_000_000
_ATTEMPTS = 5
_TOKEN = secrets.token_hex(32)
# A raylet waits 15 s for each agent to write its port to a file, even if the port is fixed.
_AGENTS = {
    "metrics-export": METRICS_PORT,
    "dashboard-agent-listen": 52365,
    "dashboard-agent-grpc": 52366,
    "runtime-env-agent": 52367,
}
_FILES = {"dashboard-agent-grpc": "metrics_agent_port"}  # other files are named like the option
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
# Limit of a node's drain. A replica's own limit is shorter.
DRAIN_S = 150


def settings() -> dict[str, str]:
    """Return the variables of `talkray env`, plus variables for small nodes."""
    return {
        **ray_settings.for_a_node(),
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),  # as in cluster/aws.yaml
        "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN", _TOKEN),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_S),
        # Starting a whole cluster on two cores is slow.
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_agent_register_timeout_ms": str(int(START_S * 1000)),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }


class Control:
    """Process in the head's namespaces that sends commands to Serve."""

    def __init__(self, head: Machine) -> None:
        self._log = head.log.open("ab")
        command = [sys.executable, "-m", "tools.experiments.fleet.control", f"{head.address}:{GCS_PORT}"]
        self._process = subprocess.Popen(
            head.inside(*command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **settings()},
            cwd=ROOT,
        )

    def ask(self, *order: Any) -> Any:
        """Send a command and return the result. Raises `RuntimeError`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the control process has ended: the head's log says why")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def end(self) -> None:
        """Stop the process, unless it ended with the head."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]  # both are pipes


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """Replica and its location."""

    id: str
    state: str
    node: str  # address
    pid: int  # inside the node's PID namespace


@dataclass(slots=True)
class Fleet:
    """Head and workers of a cluster."""

    net: Network
    scratch: Path
    environment: dict[str, str]
    key: str  # of clients
    workers: list[Machine] = field(default_factory=list)
    head: Machine = field(init=False)
    head_environment: dict[str, str] = field(default_factory=dict)  # for example the address of Ray's store
    control: Control | None = None

    def keep_in_redis(self) -> None:
        """Store Ray's state in Redis on a separate machine, so the state survives the head."""
        redis = self.net.machine("redis")
        options = ["--bind", redis.address, "--protected-mode", "no", "--save", "", "--dir", str(self.scratch)]
        redis.start(["redis-server", *options], {})
        self.head_environment = {
            "RAY_REDIS_ADDRESS": f"{redis.address}:6379",
            "RAY_external_storage_namespace": "talkray",
        }

    def start_head(self, *options: str) -> None:
        """Start or restart the head without slots for replicas. Autoscaling needs `options`."""
        if "head" not in self.net.machines:
            self.head = self.net.machine("head")
        common = [f"--port={GCS_PORT}", "--num-cpus=0", "--num-gpus=0", "--include-dashboard=false"]
        for _ in range(_ATTEMPTS):
            self._start(self.head, "--head", *common, *(options or ["--no-monitor"]), **self.head_environment)
            self.wait(lambda: not self.head.is_running or self._head_answers(), "the head")
            if self.head.is_running:
                return
            print("the head did not start: retrying", flush=True)
        raise AssertionError(f"the head did not start {_ATTEMPTS} times\n{self.tails()}")

    def _head_answers(self) -> bool:
        if not self._write_ports(self.head):
            return False
        with contextlib.suppress(OSError), socket.create_connection((self.head.address, GCS_PORT), timeout=1):
            self.control = Control(self.head)
            try:
                return self.head.address in self.alive()
            except RuntimeError:  # Ray rejects drivers until the head's own node has joined
                self.control.end()
        return False

    def kill_head(self) -> None:
        """Kill all processes of the head, as if its machine were lost."""
        self.head.kill()
        if self.control is not None:
            self.control.end()
        self.control = None

    def add(self, name: str, pool: str, *, market: str = "on-demand", **environment: str) -> Machine:
        """Start a worker with labels, and wait until it joins. Talker nodes declare a GPU to Ray."""
        machine = self.net.machine(name)
        address = f"--address={self.head.address}:{GCS_PORT}"
        slots = ["--num-cpus=1", f"--num-gpus={int(pool == TALKERS)}", f"--labels=pool={pool},market={market}"]
        self.workers.append(machine)
        for _ in range(_ATTEMPTS):
            self._start(machine, address, *slots, **environment)
            if self._joins(machine):
                return machine
            print(f"{name} did not start: retrying", flush=True)
        raise AssertionError(f"{name} did not start {_ATTEMPTS} times\n{self.tails()}")

    def _joins(self, machine: Machine) -> bool:
        def settled() -> bool:
            self._write_ports(machine)
            return not machine.is_running or machine.address in self.alive()

        self.wait(settled, f"{machine.name} in the cluster")
        return machine.is_running

    def _write_ports(self, machine: Machine) -> bool:
        """Write the ports of agents that start slowly, because their raylet would exit without the ports.

        Return whether the raylet is running.
        """
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # the raylet may exit meanwhile
                executable, *options = process.read_bytes().decode(errors="replace").split("\0")
                if executable.endswith("/raylet") and f"--node_ip_address={machine.address}" in options:
                    node_id = next(each.partition("=")[2] for each in options if each.startswith("--node_id="))
                    self._write_ports_of(node_id, self.scratch / machine.name / "session_latest")
                    return True
        return False

    def _write_ports_of(self, node_id: str, session: Path) -> None:
        for name, port in _AGENTS.items():
            stem = _FILES.get(name, f"{name.replace('-', '_')}_port")
            file = session / f"{stem}_{node_id}"
            if session.exists() and not file.exists():
                file.write_text(str(port))

    def _start(self, machine: Machine, *options: str, **environment: str) -> None:
        own = self.scratch / machine.name
        own.mkdir(exist_ok=True)
        ports = [f"--{name}-port={port}" for name, port in _AGENTS.items()]
        common = [
            *ports,
            f"--node-ip-address={machine.address}",
            f"--object-store-memory={_OBJECT_STORE}",
            f"--temp-dir={own}",
        ]
        machine.start([*_RAY, "start", "--block", *common, *options], self.environment | environment)

    def ask(self, *order: Any) -> Any:
        assert self.control is not None
        return self.control.ask(*order)

    def alive(self) -> set[str]:
        return {node["address"] for node in self.ask("nodes") if node["is_alive"]}

    def replicas(self, deployment: str, state: str = "RUNNING") -> list[PlacedReplica]:
        """Return the replicas of a deployment in a given state."""
        application = self.ask("applications").get(APP_NAME, {"deployments": {}})
        entry = application["deployments"].get(deployment, {"replicas": []})
        return [PlacedReplica(**each) for each in entry["replicas"] if each["state"] == state]

    def machine(self, address: str) -> Machine:
        return next(machine for machine in self.net.machines.values() if machine.address == address)

    def url(self, machine: Machine) -> str:
        return f"http://{machine.address}:{HTTP_PORT}"

    def open_doors(self, machines: Iterable[Machine]) -> list[str]:
        """Return the URLs of nodes once each node accepts requests, as a load balancer would check."""
        urls = [self.url(machine) for machine in machines]
        for url in urls:
            self.wait(lambda: _is_open(url), f"the door {url}")  # noqa: B023
        return urls

    def deploy(self, config: dict[str, Any]) -> None:
        """Deploy, and return once all replicas run."""
        self.wait(lambda: self.takes(config), "Serve")
        self.wait(self._runs, "the application")

    def takes(self, config: dict[str, Any]) -> bool:
        """Return whether Serve accepted a config. Serve waits a minute for proxies, and replaces hanging proxies."""
        try:
            self.ask("deploy", config)
        except RuntimeError as error:
            if "SERVE_PROXY_ACTOR" in str(error) or "HTTP proxies not available" in str(error):
                return False
            raise
        return True

    def _runs(self) -> bool:
        application = self.ask("applications").get(APP_NAME, {"status": "missing"})
        assert application["status"] != "DEPLOY_FAILED", application
        return bool(application["status"] == "RUNNING")

    def wait(self, condition: Callable[[], bool], what: str, within_s: float = START_S) -> float:
        """Wait until the condition holds, and return the seconds that it took."""
        started_s = reported_s = time.monotonic()
        while not condition():
            now_s = time.monotonic()
            assert now_s - started_s < within_s, f"{what}: not within {within_s:.0f} s\n{self.tails()}"
            if now_s - reported_s > 10:
                print(f"waiting for {what} ({now_s - started_s:.0f} s)", flush=True)
                reported_s = now_s
            time.sleep(0.2)
        return time.monotonic() - started_s

    def tails(self) -> str:
        """Return the last lines of all nodes' outputs, and Serve's status."""
        with contextlib.suppress(RuntimeError, AssertionError):
            print(json.dumps(self.ask("applications"), indent=1))
        failed = [
            line
            for log in self.scratch.glob("*/session_latest/logs/raylet*")
            for line in log.read_text(errors="replace").splitlines()
            if "heck failed" in line or "FATAL" in line
        ]
        monitor = self.scratch / "head/session_latest/logs/monitor.log"
        if monitor.exists():
            failed.append(f"--- autoscaler\n{monitor.read_text(errors='replace')[-6000:]}")
        outputs = [f"--- {name}\n{machine.tail()}" for name, machine in self.net.machines.items()]
        return "\n".join([*failed, *outputs])


def _is_open(url: str) -> bool:
    with contextlib.suppress(OSError), open_direct(f"{url}/-/healthz", timeout_s=10) as answer:
        return bool(answer.status == 200)
    return False


def scaled_down(
    fleet: Fleet, *, talkers: int = 2, codecs: int = 2, ingresses: int = 2, **args: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the production config for two cores, with the embedded voice and fractional CPUs. `args` are keyed by
    name.
    """
    config: dict[str, Any] = yaml.safe_load((ROOT / "cluster/serve/production.yaml").read_text())
    application = config["applications"][0]
    own = application["args"]
    own["model"] = "embedded"
    own["api"]["access"] = {"keys_file": str(fleet.scratch / KEYS)}
    # Two cores cannot run a whole cluster in real time.
    own["api"]["admission"] |= {"max_line_s": 100, "max_wait_s": 100, "max_late_s": 1000, "trusted_proxies": 1}
    own["talker"] |= {"max_num_seqs": 8, "device": "cpu"}
    own["talker"].pop("kv_cache_bytes")
    own["codec"] |= {"workers": 1, "precision": "float32"}
    for pool in ("talker", "codec", "ingress"):
        own[f"{pool}_pool"] |= {"num_cpus": SLOT_CPUS}
    own["talker_pool"]["num_gpus"] = 1 / PER_NODE
    own["api"]["jobs"]["pool"]["num_cpus"] = 0  # the slots of a node are for other replicas
    sizes = {"Talker": talkers, "Codec": codecs, "Ingress": ingresses}
    for deployment in application["deployments"]:
        size = sizes[deployment["name"]]
        if "autoscaling_config" in deployment:
            policy = deployment["autoscaling_config"]["policy"]["policy_kwargs"]
            policy |= {"sequences_per_replica": 8, "trend_horizon_s": 5.0} if deployment["name"] == "Talker" else {}
            deployment["autoscaling_config"] |= dict.fromkeys(
                ("min_replicas", "initial_replicas", "max_replicas"), size
            )
        else:
            deployment["num_replicas"] = size
    for name, change in args.items():
        own[name] |= change
    return config


@contextlib.contextmanager
def fleet(**environment: str) -> Iterator[Fleet]:
    """Start a head, to which workers can be added. Removes everything at the end."""
    # The path must be short, because it contains Ray's sockets.
    with (
        tempfile.TemporaryDirectory(prefix="tk", dir="/tmp", ignore_cleanup_errors=True) as scratch,
        network(Path(scratch)) as net,
    ):
        key = create_key(Path(scratch) / KEYS, "listener")
        made = Fleet(net, Path(scratch), {**settings(), **environment}, key)
        try:
            yield made
        finally:
            if made.control is not None:
                made.control.end()
