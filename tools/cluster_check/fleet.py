"""Compare the descriptions of one fleet in several formats, and check that the nodes can run the replicas."""

import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from serve_app.config import AppConfig, ConfigError, PoolConfig
from serve_app.config_file import read_config
from tools.cluster_check import machines
from tools.cluster_check.document import at, document
from tools.cluster_check.kubernetes import OVERLAYS, folder, groups, rendered


@dataclass(frozen=True, slots=True)
class Group:
    """Group of nodes of one kind."""

    name: str
    labels: Mapping[str, str]
    low: int
    high: int
    idle_s: float
    priority: int
    cpus: int
    gpus: int

    @property
    def is_spot(self) -> bool:
        return self.labels.get("market") == "spot"

    def fits(self, pool: PoolConfig) -> int:
        """Return the number of replicas of a pool that fit on one node."""
        if any(self.labels.get(name) != value for name, value in pool.label_selector.items()):
            return 0
        each = [(self.cpus, pool.num_cpus), (self.gpus, pool.num_gpus)]
        return min((math.floor(has / needs) for has, needs in each if needs), default=0)


def check(root: Path) -> Iterator[str]:
    production = root / "cluster/serve/production.yaml"
    compared: dict[str, Group] = {}
    for file in (root / name for name in machines.FILES.values()):
        fleet = _of_machines(document(file))
        compared = compared or fleet
        faults = [*_carries(fleet, production), *_equal(fleet, compared), *_machines(document(file), production)]
        yield from (f"{file}: {fault}" for fault in faults)
    for overlay in OVERLAYS:
        pods = groups(rendered(root, overlay))
        fleet, serve = _of_pods(pods), folder(root, overlay) / "serve.yaml"
        same = overlay != "small"  # the overlay "small" is a different fleet
        faults = [*_carries(fleet, serve), *(_equal(fleet, compared) if same else ())]
        faults += _fetched(pods, serve) if same else ()
        yield from (f"{folder(root, overlay)}: {fault}" for fault in faults)
    yield from _versions(root)


def _of_machines(cluster: Any) -> dict[str, Group]:
    keys = ("min_workers", "max_workers", "idle_timeout_s", "priority")  # max_workers defaults to the cluster's
    kinds = {name: kind for name, kind in cluster["available_node_types"].items() if name != cluster["head_node_type"]}
    return {name: _group(name, kind, keys, kind["resources"]) for name, kind in kinds.items()}


def _of_pods(specs: list[dict[str, Any]]) -> dict[str, Group]:
    keys, found = ("minReplicas", "maxReplicas", "idleTimeoutSeconds", "priority"), {}
    for spec in specs:
        limits = at(spec, "template", "spec", "containers", 0, "resources", "limits") or {}
        resources = {"CPU": limits.get("cpu", 0), "GPU": limits.get("nvidia.com/gpu", 0)}
        found[spec["groupName"]] = _group(spec["groupName"], spec, keys, resources)
    return found


def _group(name: str, spec: Mapping[str, Any], keys: Iterable[str], resources: Mapping[str, Any]) -> Group:
    bounds = (spec.get(key, 0) for key in keys)
    return Group(name, spec.get("labels", {}), *bounds, *(int(resources.get(kind, 0)) for kind in ("CPU", "GPU")))


def _equal(fleet: Mapping[str, Group], first: Mapping[str, Group]) -> Iterator[str]:
    if fleet.keys() != first.keys():
        yield f"has the nodes {', '.join(fleet)}, but aws.yaml has {', '.join(first)}"
    for name in fleet.keys() & first.keys():
        for field in {each.name for each in fields(Group)} - {"high", "cpus"}:
            ours, theirs = getattr(fleet[name], field), getattr(first[name], field)
            if ours != theirs:
                yield f"{name}: {field}: {ours} here, but {theirs} in aws.yaml"


def _carries(fleet: Mapping[str, Group], serve: Path) -> Iterator[str]:
    """Check bounds and idle times. Minimum sizes must run the smallest pools, and on-demand nodes the largest pools."""
    try:
        config = read_config(serve)
    except ConfigError:  # another check reports this error
        return
    for group in fleet.values():
        if group.low > group.high:
            yield f"{group.name}: the minimum, {group.low}, is greater than the maximum, {group.high}"
        if group.is_spot and group.low:
            yield f"{group.name}: spot nodes cannot guarantee a minimum: set it to 0"
        scaling = config.talker_scaling if group.gpus else config.codec_scaling
        if scaling and group.idle_s < scaling.scale_down_window_s:
            window = f"{scaling.scale_down_window_s:g} s of the pool's scale_down_window_s"
            yield f"{group.name}: idle timeout of {group.idle_s:g} s is less than the {window}"
    yield from _room([group for group in fleet.values() if not group.is_spot], config)


def _room(demand: list[Group], config: AppConfig) -> Iterator[str]:
    """Check the capacity of on-demand nodes, because spot nodes may be unavailable."""
    pools = {
        "ingress_pool": (config.ingress_pool, None),
        "talker_pool": (config.talker_pool, config.talker_scaling),
        "codec_pool": (config.codec_pool, config.codec_scaling),
    }
    for bound in ("low", "high"):
        wanted = {
            name: getattr(scaling, "min_replicas" if bound == "low" else "max_replicas", pool.replicas)
            for name, (pool, scaling) in pools.items()
        }
        for name, (pool, _) in pools.items():
            # Subtract the replicas of other pools on the same nodes.
            others = sum(
                other.num_cpus * wanted[key]
                for key, (other, _) in pools.items()
                if key != name and any(group.fits(pool) and group.fits(other) for group in demand)
            )
            room = sum(getattr(group, bound) * group.fits(pool) for group in demand)
            room -= math.ceil(others / pool.num_cpus) if name != "ingress_pool" else 0
            if room < wanted[name]:
                yield f"on-demand nodes have room for {max(room, 0)} replicas of {name}, not {wanted[name]} ({bound})"


def _machines(cluster: Any, serve: Path) -> Iterator[str]:
    """Check repeated values of a machine cluster, and that nodes download weights before they join."""
    if (command := _download(serve)) not in cluster["worker_setup_commands"]:
        yield f"worker_setup_commands: add {command}"
    floors = sum(kind.get("min_workers", 0) for kind in cluster["available_node_types"].values())
    if floors > cluster["max_workers"]:
        yield f"max_workers: is less than the sum of all min_workers, {floors}"
    for name, kind in cluster["available_node_types"].items():
        is_spot = re.search("(?i)'spot'", str(kind["node_config"])) is not None
        if name != cluster["head_node_type"] and is_spot != (kind["labels"]["market"] == "spot"):
            yield f"{name}: market is {kind['labels']['market']}, but node_config is {'' if is_spot else 'not '}spot"


def _fetched(pods: list[dict[str, Any]], serve: Path) -> Iterator[str]:
    for spec in pods:
        fetches = at(spec, "template", "spec", "initContainers") or ()
        if (command := _download(serve)) not in {" ".join(each.get("command", ())) for each in fetches}:
            yield f"{spec['groupName']}: initContainers: add {command}"


def _download(serve: Path) -> str:
    return f"hf download {at(document(serve), 'applications', 0, 'args', 'model')}"


def _versions(root: Path) -> Iterator[str]:
    """Check that tags of Talkray's images match this version."""
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    names = ["aws.yaml", "gcp.yaml", "Dockerfile", "compose/compose.yaml", "compose/gpu.yaml"]
    names += [f"kuberay/overlays/{overlay}/kustomization.yaml" for overlay in OVERLAYS]
    for file in (root / "cluster" / name for name in names):
        text = file.read_text(encoding="utf-8")
        for tag in re.findall(r"talkray(?:-[cg]pu)?(?::|, .*newTag: )([\w.]+)-[cg]pu", text):
            if tag != version:
                yield f"{file}: the tag {tag} is not this version, {version}"
