"""Who waits for whom: a stream, its replica, its node, its container. Each waits longer than what is inside it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve_app.api.sockets import IDLE_TIMEOUT_S
from serve_app.app import LONGEST_STREAM_S
from serve_app.cli.ray_settings import CLUSTER, TUNED
from tools.cluster_check.document import Fault, Where, at, document, text_fault
from tools.cluster_check.flavours import flavours
from tools.cluster_check.kubernetes import Overlay, overlays
from tools.cluster_check.machines import FILES
from tools.cluster_check.serve import app_config, files

DRAIN_S = float(CLUSTER["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
_RELOAD_S = float(TUNED["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
_HEAD_AWAY_S = float(CLUSTER["RAY_gcs_rpc_server_reconnect_timeout_s"])
_LEAST_HEAD_AWAY_S = 90
_STREAM = f"the longest stream, {LONGEST_STREAM_S:g} s"
_DRAIN = f"the drain of a node, {DRAIN_S:g} s"
_STOP_S = 20  # `talkray serve` has ended by then
_STOP_TIMEOUT = re.compile(r"--stop-timeout[ =](\d+)")


def check(root: Path) -> Iterator[Fault]:
    settings = root / "serve_app/cli/ray_settings.py"
    if not LONGEST_STREAM_S < DRAIN_S:
        yield text_fault(settings, "DRAIN_TIMEOUT", f"{DRAIN_S:g} s is not more than {_STREAM}")
    if not LONGEST_STREAM_S < _RELOAD_S:
        yield text_fault(settings, "HARD_STOP", f"{_RELOAD_S:g} s is not more than {_STREAM}")
    if _HEAD_AWAY_S < _LEAST_HEAD_AWAY_S:
        yield text_fault(settings, "reconnect_timeout", f"a head may be away for {_LEAST_HEAD_AWAY_S} s")
    for file in files(root):
        yield from _serve(file)
    for name in FILES.values():
        yield from _machines(root / name)
    for overlay in overlays(root):
        yield from _pods(overlay)
        yield from _proxies(overlay)
    for flavour in flavours(root):
        config = app_config(flavour.serve)
        for where, group in flavour.groups:
            scaling = config and (config.talker_scaling if group.gpus else config.codec_scaling)
            if scaling and group.idle_s < scaling.scale_down_window_s:
                key = "idle_timeout_s" if flavour.name in FILES else "idleTimeoutSeconds"
                window = f"{scaling.scale_down_window_s:g} s in which its pool gives a replica back"
                yield flavour.fault((*where, key), f"{group.idle_s:g} s is less than the {window}")
    yield from _one_host(root)


def _serve(file: Path) -> Iterator[Fault]:
    config = document(file)
    limit = at(config.data, ("http_options", "request_timeout_s"))
    if limit is not None and limit <= LONGEST_STREAM_S:
        yield config.fault(("http_options", "request_timeout_s"), f"{limit:g} s is not more than {_STREAM}")
    deployments: Where = ("applications", 0, "deployments")
    for index, deployment in enumerate(at(config.data, deployments, [])):
        drain = deployment.get("graceful_shutdown_timeout_s", LONGEST_STREAM_S)
        where = (*deployments, index, "graceful_shutdown_timeout_s")
        if not drain < DRAIN_S:
            yield config.fault(where, f"{drain:g} s is not less than {_DRAIN}")
        if deployment.get("name") == "Ingress" and drain < LONGEST_STREAM_S:
            yield config.fault(where, f"{drain:g} s is less than {_STREAM}")


def _machines(file: Path) -> Iterator[Fault]:
    cluster = document(file)
    found = _STOP_TIMEOUT.search(" ".join(at(cluster.data, ("docker", "run_options"), [])))
    if not found or float(found[1]) <= DRAIN_S:
        yield cluster.fault(("docker", "run_options"), f"--stop-timeout is to be more than {_DRAIN}")


def _pods(overlay: Overlay) -> Iterator[Fault]:
    service = overlay.ray_service
    delay = at(service, ("spec", "rayClusterDeletionDelaySeconds"), 60)
    if delay <= DRAIN_S:
        yield overlay.fault(
            service,
            ("spec", "rayClusterDeletionDelaySeconds"),
            f"{delay} s is not more than {_DRAIN}",
        )
    groups: Where = ("spec", "rayClusterConfig", "workerGroupSpecs")
    for index, group in enumerate(at(service, groups, [])):
        pod = at(group, ("template", "spec"), {})
        where: Where = (*groups, index, "template", "spec")
        grace = pod.get("terminationGracePeriodSeconds", 30)
        sleep = at(pod, ("containers", 0, "lifecycle", "preStop", "exec", "command"))
        before = _slept(sleep)
        if before is None:
            yield overlay.fault(service, (*where, "containers", 0, "lifecycle"), "preStop is to be: sleep SECONDS")
        elif grace <= before + DRAIN_S:
            longer = f"preStop, {before:g} s, and {_DRAIN}"
            yield overlay.fault(
                service, (*where, "terminationGracePeriodSeconds"), f"{grace} s is not more than {longer}"
            )


def _slept(command: Any) -> float | None:
    return float(command[1]) if isinstance(command, list) and len(command) == 2 and command[0] == "sleep" else None


def _proxies(overlay: Overlay) -> Iterator[Fault]:
    annotations: Where = ("metadata", "annotations")
    for ingress in overlay.of_kind("Ingress"):
        for name in ("proxy-read-timeout", "proxy-send-timeout"):
            key = f"nginx.ingress.kubernetes.io/{name}"
            value = float(at(ingress, (*annotations, key), 60))
            if value <= IDLE_TIMEOUT_S:
                quiet = f"{IDLE_TIMEOUT_S:g} s, which a WebSocket may be silent"
                yield overlay.fault(ingress, (*annotations, key), f"{value:g} s is not more than the {quiet}")
        if at(ingress, (*annotations, "nginx.ingress.kubernetes.io/proxy-buffering")) != "off":
            yield overlay.fault(ingress, annotations, "proxy-buffering is to be off: audio waits for a full buffer")
    for route in overlay.of_kind("HTTPRoute"):
        for index, rule in enumerate(at(route, ("spec", "rules"), [])):
            if at(rule, ("timeouts", "request")) != "0s":
                where: Where = ("spec", "rules", index, "timeouts", "request")
                yield overlay.fault(route, where, "is to be 0s: streams last as long as they do")


def _one_host(root: Path) -> Iterator[Fault]:
    compose = document(root / "cluster/compose/compose.yaml")
    where: Where = ("services", "talkray", "stop_grace_period")
    grace = str(at(compose.data, where, "10s"))
    if float(grace.removesuffix("s")) < _STOP_S:
        yield compose.fault(where, f"`talkray serve` may take {_STOP_S} s to end everything")
    unit = root / "cluster/talkray.service"
    found = re.search(r"^TimeoutStopSec=(\d+)", unit.read_text(encoding="utf-8"), re.MULTILINE)
    if not found or int(found[1]) < _STOP_S:
        yield text_fault(unit, "TimeoutStopSec", f"`talkray serve` may take {_STOP_S} s to end everything")
