"""What Serve's controller and Ray's control store do for a large cluster:
`python -m tools.experiments.controller_load ...`.

`paper` multiplies: messages a second at the controller and at each ingress replica. `run` starts Serve here with
replicas that do nothing but what ours do beside their work (records, reports, health checks, the watch of the pools),
and counts the processor time of the controller and of the control store (from /proc). `run --callers N` adds the
reports of N callers that are not there, each as wide as `--width` replicas.
"""

import argparse
import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serve_app.cli import ray_settings

ray_settings.apply_local()  # Ray reads them when it is imported

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private import autoscaling_metrics_codec
from ray.serve._private.common import (
    RUNNING_REQUESTS_KEY,
    DeploymentHandleSource,
    DeploymentID,
    HandleMetricReport,
    ReplicaID,
    TimeStampedValue,
)
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle

from deployments.autoscaling_records import CodecRecord, TalkerRecord
from serve_app.app import health_check_s, options, report_s
from serve_app.config import PoolConfig
from serve_app.scaling import pool_watch
from serve_app.scaling.policies import CodecScaling, TalkerScaling
from tools.suites.processes import MARK, marked

APP = "load"
POOL = PoolConfig(num_cpus=0.001)
REQUESTS = 64
_TICKS_PER_S = 100
_OLD_LOOK_S, _LIVES_PER_S = 2.0, 5.0
_OLD_REPORT_S, _OLD_HEALTH_CHECK_S = 0.5, 2.0


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Sizes of the pools."""

    talkers: int
    codecs: int
    ingresses: int

    @property
    def replicas(self) -> int:
        return self.talkers + self.codecs + self.ingresses


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages a second."""

    health_checks: float
    replica_reports: float
    handle_reports: float
    details: float  # questions for all that Serve knows
    lives: float  # questions to the control store whether an actor lives
    notes: float  # written to and read from the control store

    @property
    def at_controller(self) -> float:
        return self.health_checks + self.replica_reports + self.handle_reports + self.details

    @property
    def at_store(self) -> float:
        """What the control store takes of ours."""
        return self.lives + self.notes


def before(cluster: PoolSizes) -> Messages:
    """Fixed intervals, and each ingress asks for itself: until the watch had one that asks for all."""
    return Messages(
        health_checks=cluster.replicas / _OLD_HEALTH_CHECK_S,
        replica_reports=(cluster.talkers + cluster.codecs) / _OLD_REPORT_S,
        handle_reports=(cluster.codecs + cluster.ingresses) / _OLD_REPORT_S,
        details=cluster.ingresses / _OLD_LOOK_S,
        lives=cluster.ingresses * 3 * _LIVES_PER_S,
        notes=0.0,
    )


def now(cluster: PoolSizes) -> Messages:
    """As `serve_app.app` sets the intervals, where codec replicas call the talkers and ingresses the codec."""
    talker_s = report_s(cluster.talkers, callers=cluster.codecs + cluster.ingresses)
    codec_s = report_s(cluster.codecs, callers=cluster.ingresses)
    pools = (cluster.talkers, cluster.codecs, cluster.ingresses)
    look_s = pool_watch._TURN_S * pool_watch.turns_per_look(cluster.replicas, is_running=True)
    small = sum(size <= pool_watch._LARGEST_ASKED for size in (cluster.talkers, cluster.codecs))
    return Messages(
        health_checks=sum(size / health_check_s(size) for size in pools),
        replica_reports=cluster.talkers / talker_s + cluster.codecs / codec_s,
        handle_reports=cluster.codecs / talker_s + cluster.ingresses / codec_s,
        details=1 / look_s,
        lives=cluster.ingresses * small * _LIVES_PER_S,
        notes=cluster.ingresses / look_s,
    )


def paper(cluster: PoolSizes) -> str:
    sizes = f"{cluster.talkers} talkers, {cluster.codecs} codec replicas, {cluster.ingresses} ingresses"
    rows = [f"| {sizes} | before | now |", "|---|---|---|"]
    old, new = before(cluster), now(cluster)
    names = {
        "health_checks": "health checks",
        "replica_reports": "reports of replicas",
        "handle_reports": "reports of callers",
        "details": "questions for all details",
        "at_controller": "**at the controller, a second**",
        "lives": "questions whether an actor lives",
        "notes": "notes written and read",
        "at_store": "**at the control store, a second**",
    }
    rows += [f"| {title} | {getattr(old, name):,.1f} | {getattr(new, name):,.1f} |" for name, title in names.items()]
    each = cluster.ingresses
    reports = (1 / _OLD_REPORT_S, 1 / report_s(cluster.codecs, callers=cluster.ingresses))
    ours = [(m.details + m.at_store) / each + report for m, report in zip((old, new), reports, strict=True)]
    rows.append(f"| at one ingress, beside its requests | {ours[0]:,.1f} | {ours[1]:,.1f} |")
    return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class Watching:
    """Of one ingress replica."""

    process: int
    rank: int
    asked: int  # the controller, in a row
    running: dict[str, int]  # replicas by pool


class FakeTalker:
    """Records as a talker does, and takes calls."""

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Of one that is half full."""
        return asdict(TalkerRecord(running=4.0))

    def check_health(self) -> None: ...

    async def generate(self) -> int:
        return 1


class FakeCodec:
    """Records as a codec replica does, and holds a handle to the talkers."""

    def __init__(self, talker: DeploymentHandle) -> None:
        self._talker = talker

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Of one that is half full."""
        return asdict(CodecRecord(streams=4.0))

    def check_health(self) -> None: ...

    async def call(self) -> int:
        """One call on: with its first call a handle begins to report."""
        return int(await self._talker.generate.remote())


class FakeIngress:
    """Watches the pools as ours does, and holds a handle to the codec."""

    def __init__(self, codec: DeploymentHandle, asked_by: str) -> None:
        self._codec = codec
        if asked_by == "each":
            pool_watch._asks_for_all = lambda: True
            pool_watch._LARGEST_ASKED = sys.maxsize
        self._watch = pool_watch.PoolWatch(APP, {"": ("Talker", "Codec")})

    async def call(self) -> int:
        """As FakeCodec.call, of the codec replica that is chosen."""
        return int(await self._codec.call.remote())

    def knows(self) -> "Watching":
        """What its watch has seen and done."""
        running = {name: len(pool.running) for name, pool in self._watch._seen.pools.items()}
        rank = serve.get_replica_context().rank
        return Watching(os.getpid(), rank.rank if rank else -1, self._watch._asked, running)


def application(cluster: PoolSizes, *, asked_by: str, report_every_s: float | None) -> serve.Application:
    """Three pools with the options that ours have."""

    def scaled(size: int, *, callers: int, scaling: TalkerScaling | CodecScaling) -> dict[str, Any]:
        chosen = options(POOL, REQUESTS, scaling=scaling, callers=callers)
        if report_every_s is not None:
            config = chosen["autoscaling_config"].model_copy(
                update={"metrics_interval_s": report_every_s, "look_back_period_s": 2 * report_every_s}
            )
            chosen |= {"autoscaling_config": config, "health_check_period_s": 4 * report_every_s}
        return chosen

    talkers = TalkerScaling(min_replicas=cluster.talkers, max_replicas=cluster.talkers)
    codecs = CodecScaling(min_replicas=cluster.codecs, max_replicas=cluster.codecs)
    talker = serve.deployment(
        name="Talker",
        **scaled(cluster.talkers, callers=cluster.codecs + cluster.ingresses, scaling=talkers),
    )(FakeTalker).bind()
    codec = serve.deployment(name="Codec", **scaled(cluster.codecs, callers=cluster.ingresses, scaling=codecs))(
        FakeCodec
    ).bind(talker)
    fixed = options(POOL.model_copy(update={"replicas": cluster.ingresses}), REQUESTS)
    return serve.deployment(name="Ingress", **fixed)(FakeIngress).bind(codec, asked_by)


@ray.remote(num_cpus=0)
class Callers:
    """The reports of callers that are not there, each about so many talkers."""

    def __init__(self, callers: int, *, width: int, points: int) -> None:
        self._controller = _get_global_client()._controller
        talker = DeploymentID("Talker", APP)
        replicas = [ReplicaID(f"r{number}", talker).to_full_id_str() for number in range(width)]
        self._reports = [self._report(talker, f"caller-{n}", replicas, points) for n in range(callers)]

    def _report(self, talker: DeploymentID, handle: str, replicas: Sequence[str], points: int) -> HandleMetricReport:
        series = [TimeStampedValue(time.time(), 0.0)] * points
        metrics = {RUNNING_REQUESTS_KEY: dict.fromkeys(replicas, series)}
        return HandleMetricReport(talker, handle, None, DeploymentHandleSource.UNKNOWN, series, metrics, time.time())

    def report(self, every_s: float, seconds: float) -> int:
        """Send for so long; how many were sent. None waits for the one before it, as in a cluster."""
        began_s, sent = time.monotonic(), 0
        while (elapsed_s := time.monotonic() - began_s) < seconds:
            due = int(elapsed_s / every_s * len(self._reports))
            for number in range(sent, due):
                report = self._reports[number % len(self._reports)]
                report.timestamp = time.time()
                self._controller.record_autoscaling_metrics_from_handle.remote(autoscaling_metrics_codec.encode(report))
            sent = max(sent, due)
            time.sleep(0.01)
        return sent


@contextlib.contextmanager
def started() -> Iterator[str]:
    """Ray and Serve on this machine, without proxies; the mark of their processes."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        serve.start(proxy_location="Disabled")
        yield mark
    finally:
        serve.shutdown()
        ray.shutdown()
        del os.environ[MARK]


def cpu_s(process: int) -> float:
    """Processor time of a process and its threads."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS_PER_S


def process_of(mark: str, title: str) -> int:
    """The one that has this in its command line."""
    [process] = [process for process, command in marked(mark).items() if title in command]
    return process


def received(controller: Any) -> int:
    """Reports that the controller has taken so far."""
    health = ray.get(controller.get_health_metrics.remote())
    return int(health["handle_reports_received"]) + int(health["replica_reports_received"])


@ray.remote(num_cpus=0)
class Client:
    """Calls the application: a handle belongs to one event loop, and an actor has one for its life."""

    def __init__(self) -> None:
        self._handle = serve.get_deployment_handle("Ingress", APP)

    async def call(self, times: int) -> None:
        """From the ingresses down: so often that nearly every handle has made a call."""
        for _ in range(times):
            await self._handle.call.remote()

    async def known(self, ingresses: int) -> dict[int, Watching]:
        """What each ingress replica knows, by its rank, once so many have answered."""
        found: dict[int, Watching] = {}
        while len(found) < ingresses:
            with contextlib.suppress(RayError):  # one has died
                watching: Watching = await self._handle.knows.remote()
                found[watching.rank] = watching
        return found


def measure(mark: str, cluster: PoolSizes, options: argparse.Namespace) -> dict[str, Any]:
    """Processor time over `--seconds`, once every replica runs and has called."""
    client = Client.remote()
    ray.get(client.call.remote(4 * cluster.replicas))
    parts = {"controller": "ServeController", "store": "gcs_server", "raylet": "raylet/raylet"}
    processes = {name: process_of(mark, title) for name, title in parts.items()}
    ingresses = [pid for pid, command in marked(mark).items() if f"ServeReplica:{APP}:Ingress" in command]
    callers = Callers.remote(options.callers, width=options.width, points=5) if options.callers else None
    if callers is not None:
        ray.get(callers.__ray_ready__.remote())
    time.sleep(5.0)
    reports_s = options.reports_every or report_s(
        cluster.talkers, callers=cluster.codecs + cluster.ingresses + options.callers
    )
    sending = callers.report.remote(reports_s, options.seconds) if callers is not None else None
    controller = _get_global_client()._controller
    taken = received(controller)
    begun_s, used = time.monotonic(), {name: cpu_s(process) for name, process in processes.items()}
    used_by_ingresses = sum(map(cpu_s, ingresses))
    while time.monotonic() - begun_s < options.seconds:
        time.sleep(min(5.0, options.seconds))
        print(f"measured {time.monotonic() - begun_s:.0f} of {options.seconds:.0f} s", file=sys.stderr, flush=True)
    elapsed_s = time.monotonic() - begun_s
    cores = {name: round((cpu_s(process) - used[name]) / elapsed_s, 4) for name, process in processes.items()}
    cores["ingress"] = round((sum(map(cpu_s, ingresses)) - used_by_ingresses) / elapsed_s / len(ingresses), 4)
    sent = ray.get(sending) if sending is not None else 0
    took = received(controller) - taken
    asked_s = time.monotonic()
    details = json.dumps(_get_global_client().get_serve_details(), default=str)
    return {
        "cores": cores,
        "sent_per_s": round(sent / elapsed_s, 1),
        "reports_taken_per_s": round(took / elapsed_s, 1),
        "details_ms": round(1000 * (time.monotonic() - asked_s), 1),
        "details_kb": round(len(details) / 1000, 1),
        "asked": {rank: each.asked for rank, each in sorted(ray.get(client.known.remote(cluster.ingresses)).items())},
    }


def deploy(cluster: PoolSizes, *, asked_by: str = "one", report_every_s: float | None = None) -> float:
    """Return once all replicas run; how long that took."""
    app = application(cluster, asked_by=asked_by, report_every_s=report_every_s)
    target = serve.RunTarget(app, name=APP, route_prefix=None)
    began_s = time.monotonic()
    serve.run_many([target], wait_for_applications_running=False)
    while (status := serve.status().applications[APP]).status != "RUNNING":
        up = sum(deployment.replica_states.get("RUNNING", 0) for deployment in status.deployments.values())
        print(f"{up} of {cluster.replicas} replicas after {time.monotonic() - began_s:.0f} s", file=sys.stderr)
        time.sleep(5.0)
    return time.monotonic() - began_s


def run(options: argparse.Namespace) -> dict[str, Any]:
    cluster = PoolSizes(options.talkers, options.codecs, options.ingresses)
    with started() as mark:
        started_s = deploy(cluster, asked_by=options.asked_by, report_every_s=options.reports_every)
        found = measure(mark, cluster, options)
    about = {"asked_by": options.asked_by, "reports_every": options.reports_every, "callers": options.callers}
    return asdict(cluster) | about | {"width": options.width, "started_s": round(started_s, 1)} | found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.experiments.controller_load", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(dest="what", required=True)
    multiply, start = commands.add_parser("paper"), commands.add_parser("run")
    for command, sizes in ((multiply, (100, 1600, 200)), (start, (4, 20, 8))):
        for name, size in zip(("talkers", "codecs", "ingresses"), sizes, strict=True):
            command.add_argument(f"--{name}", type=int, default=size)
    start.add_argument("--asked-by", choices=("one", "each"), default="one", help="who asks the controller")
    start.add_argument("--reports-every", type=float, help="seconds, instead of what serve_app.app says")
    start.add_argument("--callers", type=int, default=0, help="more that report, without being there")
    start.add_argument("--width", type=int, default=100, help="replicas in each of their reports")
    start.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args(arguments)
    if options.what == "paper":
        print(paper(PoolSizes(options.talkers, options.codecs, options.ingresses)))
    else:
        print(json.dumps(run(options)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
