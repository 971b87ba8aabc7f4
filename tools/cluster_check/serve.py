"""Check Ray Serve's configuration: schema, ignored keys, Talkray's settings, and imports."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.errors import StartError
from serve_app.app import LONGEST_STREAM_S
from serve_app.cli.ray_settings import CLUSTER, LOCAL, TUNED
from serve_app.config import POOLS, AppConfig, ConfigError
from serve_app.config_file import read_config
from tools.cluster_check.document import DRAIN_S, at, document, rules

# Files that exist twice, because two readers expect them at different paths.
_COPIES = {
    "cluster/serve/one-gpu.yaml": "serve_app/cli/one-gpu.yaml",
    "cluster/kuberay/overlays/large/serve.yaml": "cluster/serve/production.yaml",
}
_IMPORTED = (TUNED["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"], LOCAL["RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"])
_LEAST_HEAD_AWAY_S = 90


def check(root: Path) -> Iterator[str]:
    for file in sorted([*root.glob("cluster/serve/*.yaml"), *root.glob("cluster/kuberay/overlays/*/serve.yaml")]):
        try:
            for fault in _config(file):
                yield f"{file}: {fault}"
        except (StartError, ValidationError, ConfigError) as error:
            yield f"{file}: {' '.join(str(error).removeprefix(f'{file}: ').split())}"
        yield from rules("serve", str(file), document(file))
    for copy, original in _COPIES.items():
        if (root / copy).read_bytes() != (root / original).read_bytes():
            yield f"{root / copy}: must be a copy of {original}"
    yield from (fault for path in _IMPORTED for fault in cannot_import(path))
    yield from _waits()


def _config(file: Path) -> Iterator[str]:
    config = document(file)
    for path in re.findall(r"(?:import_path|policy_function): (\S+)", file.read_text(encoding="utf-8")):
        for fault in cannot_import(path):
            yield fault
            return  # Serve's own check imports the module, too
    yield from _ignored(config, ServeDeploySchema.model_validate(config).model_dump(exclude_unset=True))
    settings = read_config(file)
    settings.api.access.for_host(at(config, "http_options", "host"))
    talkers = [(own.talker_pool, own.talker_scaling) for own in settings.by_model().values()]
    for pool, scaling in (*talkers, (settings.codec_pool, settings.codec_scaling)):
        if scaling and not scaling.min_replicas <= pool.replicas <= scaling.max_replicas:
            yield f"replicas: {pool.replicas} is not in the range {scaling.min_replicas} to {scaling.max_replicas}"
    if settings.codec.workers > max(1, settings.codec_pool.num_cpus):
        yield f"codec.workers: {settings.codec.workers} is more than codec_pool.num_cpus"
    yield from _sizes_among_args(at(config, "applications", 0, "args"))
    for deployment in at(config, "applications", 0, "deployments") or ():
        yield from _derived(deployment, settings)
        drain_s = deployment.get("graceful_shutdown_timeout_s", LONGEST_STREAM_S)
        if deployment.get("name") == "Ingress" and drain_s < LONGEST_STREAM_S:
            yield f"graceful_shutdown_timeout_s: {drain_s} s is less than the longest stream"


def _sizes_among_args(args: Any) -> Iterator[str]:
    """Yield pool sizes in `args`, because changing them would replace every replica."""
    for own in (args, *(args.get("models") or ())):
        for pool in POOLS.values():
            fields = {*(own.get(f"{pool}_pool") or {}), *(own.get(f"{pool}_scaling") or {})}
            for name in sorted(fields & {"replicas", "min_replicas", "max_replicas"}):
                yield f"{pool}: set {name} under `deployments`, because a change in `args` replaces all replicas"


def _derived(deployment: Any, settings: AppConfig) -> Iterator[str]:
    """Check values of a pool's policy that are derived from other settings."""
    kind, _, model = deployment["name"].partition("-")
    own = settings.by_model().get(model, settings)
    if kind not in ("Talker", "Codec") or "autoscaling_config" not in deployment:
        return
    given = at(deployment, "autoscaling_config", "policy", "policy_kwargs") or {}
    if kind == "Talker" and given.get("sequences_per_replica") != own.talker.max_num_seqs:
        yield f"{deployment['name']}: sequences_per_replica: must equal talker.max_num_seqs, {own.talker.max_num_seqs}"
    if kind == "Codec" and deployment.get("max_ongoing_requests") != settings.codec_requests:
        yield f"Codec: max_ongoing_requests: must be {settings.codec_requests}, from its streams_per_replica"


def _ignored(given: Any, kept: Any, where: str = "") -> Iterator[str]:
    """Yield the keys that Serve silently ignores."""
    if isinstance(given, dict) and isinstance(kept, dict):
        yield from (f"{where}{key}: Serve ignores this key" for key in given.keys() - kept.keys())
        for key in given.keys() & kept.keys():
            yield from _ignored(given[key], kept[key], f"{where}{key}.")
    elif isinstance(given, list):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from _ignored(one, other, f"{where}{index}.")


def cannot_import(path: str) -> Iterator[str]:
    """Yield the reason why `module:name` or `module.name` cannot be imported."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        yield f"{path} cannot be imported: {error}"


def _waits() -> Iterator[str]:
    """Check that each of Ray's timeouts is longer than the operation it limits."""
    for name, value, least in (
        ("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", DRAIN_S, LONGEST_STREAM_S),
        (hard_stop := "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", float(TUNED[hard_stop]), LONGEST_STREAM_S),
        (head_away := "RAY_gcs_rpc_server_reconnect_timeout_s", float(CLUSTER[head_away]), _LEAST_HEAD_AWAY_S),
    ):
        if value <= least:
            yield f"serve_app/cli/ray_settings.py: {name}: {value:g} s is not more than {least:g} s"
