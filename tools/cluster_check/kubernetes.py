"""Check the kustomize output of `cluster/kuberay/`: manifests by their schemas, and references between manifests."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from tools.cluster_check.document import DRAIN_S, Unreadable, against, at, rules, schema

VERSION = "1.33"
OVERLAYS = ("small", "large")
_GRACE = "terminationGracePeriodSeconds"
_SELECTING = {"PodDisruptionBudget": "selector", "NetworkPolicy": "podSelector", "PodMonitor": "selector"}

Manifests = dict[str, list[dict[str, Any]]]  # keyed by kind


def folder(root: Path, overlay: str) -> Path:
    return root / "cluster/kuberay/overlays" / overlay


@cache
def rendered(root: Path, overlay: str) -> Manifests:
    """Render an overlay with kustomize. Raises `Unreadable`."""
    path = str(folder(root, overlay))
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", path]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build", path]
    else:
        raise Unreadable(f"{path}: to render it, install kubectl 1.27 or later, or kustomize 5")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unreadable(f"{path}: kustomize failed: {done.stderr.strip()}")
    manifests: Manifests = {}
    for manifest in yaml.load_all(done.stdout, yaml.CSafeLoader):
        manifests.setdefault(manifest["kind"], []).append(manifest)
    return manifests


def groups(manifests: Manifests) -> list[dict[str, Any]]:
    """Return the worker groups of the only RayService."""
    found: list[dict[str, Any]] = manifests["RayService"][0]["spec"]["rayClusterConfig"].get("workerGroupSpecs", [])
    return found


def check(root: Path) -> Iterator[str]:
    for overlay in OVERLAYS:
        manifests = rendered(root, overlay)
        for kind, those in manifests.items():
            for manifest in those:
                name = f"{folder(root, overlay)}: {kind} {manifest['metadata']['name']}"
                spec = schema(kind)
                yield from against(name, manifest["spec"], spec) if spec else _native(name, manifest)
                if kind in ("RayService", "Ingress", "HTTPRoute"):
                    yield from rules(kind, name, manifest)
        yield from _pods(f"{folder(root, overlay)}: RayService", manifests)
        yield from (f"{folder(root, overlay)}: {fault}" for fault in _references(manifests))


def _native(name: str, manifest: dict[str, Any]) -> Iterator[str]:
    """Check a manifest against Kubernetes' own schema."""
    if fault := _fault(json.dumps(manifest)):
        yield f"{name}: {fault}"


@cache  # most manifests are equal in all overlays, and validation is slow
def _fault(manifest: str) -> str:
    """Return the errors of a manifest, given as JSON; empty if valid."""
    try:
        kubernetes_validate.validate(json.loads(manifest), VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return str(error.message)
    return ""


def _pods(name: str, manifests: Manifests) -> Iterator[str]:
    """Check the groups of a RayService and their pods."""
    workers = groups(manifests)
    for group in [manifests["RayService"][0]["spec"]["rayClusterConfig"]["headGroupSpec"], *workers]:
        where = f"{name}: {group.get('groupName', 'head')}"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}} | group["template"]
        yield from _native(where, pod)
        yield from rules("group", where, group)
    for group in workers:
        chosen = at(group, "template", "spec", "nodeSelector") or {}
        labels = {f"talkray/{key}": value for key, value in group["labels"].items()}
        if labels != chosen:
            yield f"{name}: {group['groupName']}: nodeSelector must equal the labels, {labels}"
        if at(group, "template", "metadata", "labels", "talkray/pool") != group["labels"]["pool"]:
            yield f"{name}: {group['groupName']}: the pods need the label talkray/pool={group['labels']['pool']}"
        match at(group, "template", "spec", "containers", 0, "lifecycle", "preStop", "exec", "command"):
            case ["sleep", seconds]:
                needed_s, grace_s = float(seconds) + DRAIN_S, at(group, "template", "spec", _GRACE) or 30
                if grace_s <= needed_s:
                    yield f"{name}: {group['groupName']}: {_GRACE}: {grace_s}, but preStop and drain take {needed_s:g}"
            case _:
                yield f"{name}: {group['groupName']}: preStop must be: sleep SECONDS"


def _references(manifests: Manifests) -> Iterator[str]:
    """Check that names and labels used by one manifest exist in another."""
    cluster = manifests["RayService"][0]["spec"]["rayClusterConfig"]
    templates = [each["template"] for each in (cluster["headGroupSpec"], *groups(manifests))]
    templates += [each["spec"]["template"] for each in manifests.get("StatefulSet", [])]
    pods = [at(template, "metadata", "labels") or {} for template in templates]
    for kind, key in _SELECTING.items():
        for manifest in manifests.get(kind, []):
            wanted = at(manifest, "spec", key, "matchLabels") or {}
            if not any(wanted.items() <= labels.items() for labels in pods):
                yield f"{kind} {manifest['metadata']['name']}: no pod has the labels {wanted}"
    ports = {port["name"] for each in templates for box in each["spec"]["containers"] for port in box.get("ports", [])}
    for monitor in manifests.get("PodMonitor", []):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if endpoint.get("port") not in ports:
                yield f"PodMonitor: no container has a port {endpoint.get('port')}"
    served = (f"{manifests['RayService'][0]['metadata']['name']}-serve-svc", 8000)
    for backend in _backends(manifests):
        if backend != served:
            yield f"{backend}: KubeRay's service is {served[0]}, port {served[1]}"


def _backends(manifests: Manifests) -> Iterator[tuple[Any, Any]]:
    for ingress in manifests.get("Ingress", []):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                yield at(path, "backend", "service", "name"), at(path, "backend", "service", "port", "number")
    for route in manifests.get("HTTPRoute", []):
        for rule in route["spec"]["rules"]:
            yield from ((backend.get("name"), backend.get("port")) for backend in rule.get("backendRefs", []))
