"""The same fleet in several notations: what has to be equal, and whether the nodes can carry the replicas."""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.config import AppConfig, PoolConfig
from tools.cluster_check.document import Document, Fault, Where, at, document, text_fault
from tools.cluster_check.kubernetes import Overlay, overlays
from tools.cluster_check.machines import FILES
from tools.cluster_check.serve import app_config

_TAG = re.compile(r"talkray:(?P<version>[\w.]+)-(?:cpu|gpu)")


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes of one kind."""

    name: str
    labels: Mapping[str, str]
    low: int
    high: int
    idle_s: float
    priority: int
    cpus: int
    gpus: int

    def fits(self, pool: PoolConfig) -> int:
        """How many replicas of a pool a node carries."""
        if any(self.labels.get(name) != value for name, value in pool.label_selector.items()):
            return 0
        each = [(self.cpus, pool.num_cpus), (self.gpus, pool.num_gpus)]
        return min((math.floor(has / needs) for has, needs in each if needs), default=0)


@dataclass(frozen=True, slots=True)
class Flavour:
    """A fleet, what runs on it, and how its faults are said."""

    name: str
    groups: tuple[tuple[Where, Group], ...]
    serve: Path
    source: Document | Overlay

    def fault(self, where: Where, message: str) -> Fault:
        """One at a value of it."""
        if isinstance(self.source, Document):
            return self.source.fault(where, message)
        return self.source.fault(self.source.ray_service, where, message)


def flavours(root: Path) -> Iterator[Flavour]:
    """All of them; the first one is what the others are compared with."""
    production = root / "cluster/serve/production.yaml"
    for name, file in FILES.items():
        cluster = document(root / file)
        types = {key: kind for key, kind in cluster.data["available_node_types"].items() if "labels" in kind}
        groups: tuple[tuple[Where, Group], ...]
        groups = tuple((("available_node_types", key), _machine(key, kind)) for key, kind in types.items())
        yield Flavour(name, groups, production, cluster)
    for overlay in overlays(root):
        path: Where = ("spec", "rayClusterConfig", "workerGroupSpecs")
        specs = at(overlay.ray_service, path, [])
        groups = tuple(((*path, index), _pods(spec)) for index, spec in enumerate(specs))
        yield Flavour(overlay.name, groups, overlay.folder / "serve.yaml", overlay)


def _machine(name: str, kind: Mapping[str, Any]) -> Group:
    resources = kind.get("resources", {})
    return Group(
        name,
        kind["labels"],
        kind.get("min_workers", 0),
        kind.get("max_workers", 0),
        kind.get("idle_timeout_s", 0),
        kind.get("priority", 0),
        resources.get("CPU", 0),
        resources.get("GPU", 0),
    )


def _pods(spec: Mapping[str, Any]) -> Group:
    limits = at(spec, ("template", "spec", "containers", 0, "resources", "limits"), {})
    return Group(
        spec["groupName"],
        spec.get("labels", {}),
        spec["minReplicas"],
        spec["maxReplicas"],
        spec.get("idleTimeoutSeconds", 0),
        spec.get("priority", 0),
        int(limits.get("cpu", 0)),
        int(limits.get("nvidia.com/gpu", 0)),
    )


def check(root: Path) -> Iterator[Fault]:
    compared: dict[str, Group] = {}
    for flavour in flavours(root):
        config = app_config(flavour.serve)
        if config is None:  # its own check says why
            continue
        yield from _carries(flavour, config)
        if flavour.name == "small":  # is another fleet
            continue
        compared = compared or {group.name: group for _, group in flavour.groups}
        yield from _equal(flavour, compared)
        yield from _weights(flavour, config)
    yield from _versions(root)


def _equal(flavour: Flavour, first: Mapping[str, Group]) -> Iterator[Fault]:
    names = {group.name for _, group in flavour.groups}
    for missing in first.keys() - names:
        yield flavour.fault((), f"lacks the nodes {missing} of aws.yaml")
    for where, group in flavour.groups:
        model = first.get(group.name)
        if model is None:
            yield flavour.fault(where, f"aws.yaml has no nodes {group.name}")
            continue
        for field, key in (
            ("labels", "labels"),
            ("low", "min_workers" if isinstance(flavour.source, Document) else "minReplicas"),
            ("idle_s", "idle_timeout_s" if isinstance(flavour.source, Document) else "idleTimeoutSeconds"),
            ("priority", "priority"),
            ("gpus", "resources"),
        ):
            ours, theirs = getattr(group, field), getattr(model, field)
            if ours != theirs:
                yield flavour.fault((*where, key), f"{ours} here, and {theirs} in aws.yaml")


def _carries(flavour: Flavour, config: AppConfig) -> Iterator[Fault]:
    """Floors carry the smallest pools, and nodes on demand alone the largest: spot may be refused."""
    pools = {
        "ingress_pool": (config.ingress_pool, config.ingress_pool.replicas, config.ingress_pool.replicas),
        "talker_pool": (config.talker_pool, *_bounds(config.talker_pool, config.talker_scaling)),
        "codec_pool": (config.codec_pool, *_bounds(config.codec_pool, config.codec_scaling)),
    }
    demand = [group for _, group in flavour.groups if group.labels.get("market") == "on-demand"]
    for name, (pool, low, high) in pools.items():
        for nodes, replicas, what in (("low", low, "fewest"), ("high", high, "most")):
            # What shares the nodes needs its part of them.
            others = sum(
                other.num_cpus * (least if nodes == "low" else most)
                for key, (other, least, most) in pools.items()
                if key != name and any(group.fits(pool) and group.fits(other) for group in demand)
            )
            room = sum(getattr(group, nodes) * group.fits(pool) for group in demand)
            room -= math.ceil(others / pool.num_cpus) if name != "ingress_pool" else 0
            if room < replicas:
                where = next((where for where, group in flavour.groups if group.fits(pool)), ())
                yield flavour.fault(
                    where, f"nodes on demand have room for {max(room, 0)} replicas of {name}, {replicas} are its {what}"
                )


def _bounds(pool: PoolConfig, scaling: Any) -> tuple[int, int]:
    return (scaling.min_replicas, scaling.max_replicas) if scaling else (pool.replicas, pool.replicas)


def _weights(flavour: Flavour, config: AppConfig) -> Iterator[Fault]:
    """A node has the weights before it joins."""
    wanted = f"hf download {config.model}"
    if isinstance(flavour.source, Document):
        if wanted not in flavour.source.data.get("worker_setup_commands", []):
            yield flavour.fault(("worker_setup_commands",), f"is to have: {wanted}")
        return
    for where, _ in flavour.groups:
        pod = (*where, "template", "spec")
        fetches = at(flavour.source.ray_service, (*pod, "initContainers"), [])
        if wanted not in {" ".join(each.get("command", [])) for each in fetches}:
            yield flavour.fault((*pod, "initContainers"), f"is to have: {wanted}")


def _versions(root: Path) -> Iterator[Fault]:
    """Tags of our images are this version."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    version = project["project"]["version"]
    names = [*FILES.values(), "cluster/Dockerfile", "cluster/compose/compose.yaml", "cluster/compose/gpu.yaml"]
    for file in (root / name for name in names):
        for found in _TAG.finditer(file.read_text(encoding="utf-8")):
            if found["version"] != version:
                yield text_fault(file, found[0], f"the tag of {found[0]} is not this version, {version}")
    for overlay in overlays(root):
        file = overlay.folder / "kustomization.yaml"
        for index, image in enumerate(at(document(file).data, ("images",), [])):
            tag = f"{version}-{str(image.get('name')).removeprefix('talkray-')}"
            if image.get("newTag") != tag:
                yield document(file).fault(("images", index, "newTag"), f"is to be {tag}")
