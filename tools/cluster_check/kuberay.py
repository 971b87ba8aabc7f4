"""A RayService: the fields of KubeRay 1.7's CRD, the operator's own rules that matter here, and ours."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from tools.cluster_check.document import Where, at

Problem = tuple[Where, str]  # below the manifest
Pod = Callable[[Any], Iterator[Problem]]  # checks a pod template

_CLUSTER: Where = ("spec", "rayClusterConfig")
_UPGRADES = ("None", "NewCluster", "NewClusterWithIncrementalUpgrade")
_START = 'eval "exec $KUBERAY_GEN_RAY_START_CMD"'
_LONGEST_NAME = 41
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DURATION = re.compile(r"(\d+[hms])+|[1-9]\d*")
# Of a head's environment, by what is to be used instead.
_NOT_IN_ENV = {
    "RAY_REDIS_ADDRESS": "gcsFaultToleranceOptions.redisAddress",
    "REDIS_PASSWORD": "gcsFaultToleranceOptions.redisPassword",
    "REDIS_USERNAME": "gcsFaultToleranceOptions.redisUsername",
    "RAY_enable_autoscaler_v2": "autoscalerOptions.version",
}
_SECRET = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "value": {"type": "string"},
        "valueFrom": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                name: {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["key", "name"],
                    "properties": {"name": {"type": "string"}, "key": {"type": "string"}},
                }
                for name in ("secretKeyRef", "configMapKeyRef")
            },
        },
    },
}
_LEAVES: dict[str, dict[str, Any]] = {
    "any": {},
    "pod": {"type": "object", "required": ["spec"]},
    "secret": _SECRET,
    "strings": {"type": "object", "additionalProperties": {"type": "string"}},
    "string[]": {"type": "array", "items": {"type": "string"}},
    "integer or string": {"type": ["integer", "string"]},
    **{name: {"type": name} for name in ("string", "integer", "boolean")},
}


@cache
def schema(kind: str) -> dict[str, Any] | None:
    """The JSON schema of a manifest's `spec`; None for a kind that is none of ours."""
    kinds = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text(encoding="utf-8"))
    return _expanded(kinds[kind]) if kind in kinds else None


def _expanded(compact: Any) -> dict[str, Any]:
    if isinstance(compact, str):
        return _LEAVES.get(compact) or ({} if compact == "any" else {"enum": compact.split("|")})
    properties, required = {}, []
    for key, inner in compact.items():
        name = key.removesuffix("[]").removesuffix("!")
        value = _expanded(inner)
        properties[name] = {"type": "array", "items": value} if key.endswith("[]") else value
        if key.removesuffix("[]").endswith("!"):
            required.append(name)
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required}


def problems(manifest: Mapping[str, Any], pod: Pod) -> Iterator[Problem]:
    """Of a rendered RayService, beyond its schema."""
    yield from _names(manifest)
    yield from _upgrade(manifest)
    cluster = at(manifest, _CLUSTER, {})
    head = at(cluster, ("headGroupSpec",), {})
    groups: list[tuple[Where, Mapping[str, Any]]] = [((*_CLUSTER, "headGroupSpec"), head)]
    workers = cluster.get("workerGroupSpecs", [])
    groups += [((*_CLUSTER, "workerGroupSpecs", index), group) for index, group in enumerate(workers)]
    for where, group in groups:
        yield from _group(where, group, scales=bool(cluster.get("enableInTreeAutoscaling")))
        template = group.get("template", {})
        yield from (((*where, "template", *inner), message) for inner, message in pod(template))
    yield from _head(manifest, head, cluster)
    yield from _workers(workers)


def _names(manifest: Mapping[str, Any]) -> Iterator[Problem]:
    name = at(manifest, ("metadata", "name"), "")
    if len(name) > _LONGEST_NAME or not _LABEL.fullmatch(name):
        yield ("metadata", "name"), f"is to be a DNS label of at most {_LONGEST_NAME} characters"
    annotations: Where = ("metadata", "annotations")
    patience = at(manifest, (*annotations, "ray.io/initializing-timeout"))
    if patience is not None and not _DURATION.fullmatch(str(patience)):
        yield (*annotations, "ray.io/initializing-timeout"), "is no duration such as 30m, and no number of seconds"
    if at(manifest, (*annotations, "ray.io/overwrite-container-cmd")) != "true":
        yield annotations, 'lacks ray.io/overwrite-container-cmd: "true": Ray would start without the tuned settings'


def _upgrade(manifest: Mapping[str, Any]) -> Iterator[Problem]:
    where: Where = ("spec", "upgradeStrategy")
    kind = at(manifest, (*where, "type"), "NewCluster")
    if kind not in _UPGRADES:
        yield (*where, "type"), f"{kind} is none of {', '.join(_UPGRADES)}"
    if kind == "NewClusterWithIncrementalUpgrade":
        chosen = at(manifest, (*where, "clusterUpgradeOptions"))
        if chosen is None:
            yield where, "an incremental upgrade needs clusterUpgradeOptions"
        elif not 0 <= chosen.get("maxSurgePercent", 100) <= 100 or not 0 <= chosen.get("stepSizePercent", 0) <= 100:
            yield (*where, "clusterUpgradeOptions"), "percentages are between 0 and 100"
        if not at(manifest, (*_CLUSTER, "enableInTreeAutoscaling")):
            yield where, "an incremental upgrade needs enableInTreeAutoscaling"
    if at(manifest, ("spec", "rayClusterDeletionDelaySeconds"), 0) < 0:
        yield ("spec", "rayClusterDeletionDelaySeconds"), "is negative"


def _group(where: Where, group: Mapping[str, Any], *, scales: bool) -> Iterator[Problem]:
    starts = group.get("rayStartParams") or {}
    if "labels" in starts:
        yield (*where, "rayStartParams", "labels"), "KubeRay takes them from `labels` of the group only"
    if group.get("resources") and starts.keys() & {"num-cpus", "num-gpus", "memory", "resources"}:
        yield (*where, "resources"), "resources stand in rayStartParams as well"
    pod: Where = (*where, "template", "spec")
    policy = at(group, ("template", "spec", "restartPolicy"), "Never")
    if scales and policy != "Never":
        yield (*pod, "restartPolicy"), "is to be Never, or unset, with autoscaler v2"
    containers = at(group, ("template", "spec", "containers"), [])
    if not containers:
        yield (*pod, "containers"), "there is none"
        return
    line = " ".join([*containers[0].get("command", []), *containers[0].get("args", [])])
    for wanted in ('eval "$(talkray env)"', _START):
        if wanted not in line:
            yield (*pod, "containers", 0, "args"), f"lacks {wanted}"
    if not at(containers, (0, "resources", "limits", "memory")):
        yield (
            (*pod, "containers", 0, "resources"),
            "without a limit of memory Ray takes the whole machine's",
        )
    if at(containers, (0, "securityContext", "runAsNonRoot")) is not True:
        yield (*pod, "containers", 0, "securityContext"), "runAsNonRoot is to be true"


def _head(manifest: Mapping[str, Any], head: Mapping[str, Any], cluster: Mapping[str, Any]) -> Iterator[Problem]:
    where: Where = (*_CLUSTER, "headGroupSpec")
    starts = head.get("rayStartParams") or {}
    if starts.get("num-cpus") != "0":
        yield (*where, "rayStartParams"), 'num-cpus is to be "0": no replica belongs on the head'
    for name in starts.keys() & {"redis-password", "redis-username"}:
        yield (*where, "rayStartParams", name), "belongs into gcsFaultToleranceOptions"
    env = at(head, ("template", "spec", "containers", 0, "env"), [])
    for index, variable in enumerate(env):
        if instead := _NOT_IN_ENV.get(variable.get("name")):
            yield (*where, "template", "spec", "containers", 0, "env", index), f"use {instead}"
    if at(head, ("headService", "metadata", "name")):
        yield (*where, "headService"), "its name is the operator's"
    if "gcsFaultToleranceOptions" not in cluster:
        yield _CLUSTER, "without gcsFaultToleranceOptions nothing outlives the head"
    elif "ray.io/ft-enabled" in at(manifest, ("metadata", "annotations"), {}):
        yield ("metadata", "annotations", "ray.io/ft-enabled"), "gcsFaultToleranceOptions says so already"
    if at(cluster, ("autoscalerOptions", "version")) != "v2" or not cluster.get("enableInTreeAutoscaling"):
        yield (*_CLUSTER, "autoscalerOptions"), "is to be the autoscaler v2, and enableInTreeAutoscaling true"
    if at(cluster, ("authOptions", "mode")) != "token":
        yield (*_CLUSTER, "authOptions"), "mode is to be token: whoever reaches Ray's ports runs code"
    if str(cluster.get("rayVersion")) != version("ray"):
        yield (*_CLUSTER, "rayVersion"), f"the image has Ray {version('ray')}"


def _workers(groups: list[Mapping[str, Any]]) -> Iterator[Problem]:
    names = [group.get("groupName") for group in groups]
    for index, group in enumerate(groups):
        where: Where = (*_CLUSTER, "workerGroupSpecs", index)
        low, high = group.get("minReplicas", 0), group.get("maxReplicas", 0)
        if low > high:
            yield (*where, "maxReplicas"), f"{high} is less than minReplicas, {low}"
        if names.count(names[index]) > 1:
            yield (*where, "groupName"), "another group has this name"
        spot = at(group, ("labels", "market")) == "spot"
        if spot and low:
            yield (*where, "minReplicas"), "a floor on spot is none"
        chosen = at(group, ("template", "spec", "nodeSelector"), {})
        for name in ("pool", "market"):
            if chosen.get(f"talkray/{name}") != at(group, ("labels", name)):
                yield (*where, "template", "spec", "nodeSelector"), f"talkray/{name} is another than the label {name}"
        if at(group, ("template", "metadata", "labels", "talkray/pool")) != at(group, ("labels", "pool")):
            yield (*where, "template", "metadata", "labels"), "talkray/pool is another than the label pool"
