"""What kustomize makes of `cluster/kuberay/`: every manifest by its schema, and what one names of another.

A fault of a rendered manifest is said at the line that it comes from.
"""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from tools.cluster_check import kuberay
from tools.cluster_check.document import Document, Fault, Unreadable, Where, at, documents, explained, text_fault

VERSION = "1.33"
OVERLAYS = ("small", "large")
_KUSTOMIZATION = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "resources"],
    "properties": {
        **{name: {"type": "string"} for name in ("apiVersion", "kind", "namespace")},
        **{
            name: {"type": "array"} for name in ("resources", "images", "configMapGenerator", "replacements", "patches")
        },
    },
}
_SELECTING = {"PodDisruptionBudget": ("selector",), "NetworkPolicy": ("podSelector",), "PodMonitor": ("selector",)}


@dataclass(frozen=True, slots=True)
class Overlay:
    """One, and where its manifests come from."""

    name: str
    folder: Path
    manifests: tuple[dict[str, Any], ...]
    sources: Mapping[tuple[str, str], Document]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    @property
    def ray_service(self) -> dict[str, Any]:
        [service] = self.of_kind("RayService")
        return service

    def fault(self, manifest: Mapping[str, Any], where: Where, message: str) -> Fault:
        """One at the source of a value: lists are matched by the names of their items."""
        source = self.sources.get(_key(manifest))
        kustomization = self.folder / "kustomization.yaml"
        if source is None:
            return Fault(kustomization, 1, message)
        found: list[str | int] = []
        rendered, written = manifest, source.data
        for part in where:
            inner = at(rendered, (part,))
            step = part if isinstance(part, str) else _same(inner, part, written)
            if at(written, (step,)) is None:
                break
            found.append(step)
            rendered, written = inner, written[step]
        if rendered != written and not isinstance(written, dict | list):  # the overlay's own value
            patch = f"{found[-1]}, value: {rendered}"
            return text_fault(kustomization, patch, f"{'.'.join(map(str, where))}: {message}")
        return source.fault(tuple(found), message)


def _same(rendered: Any, index: int, written: Any) -> int:
    """The index in the source of the item that has the same name."""
    for key in ("groupName", "name"):
        name = at(rendered, (key,))
        for number, item in enumerate(written if isinstance(written, list) and name else ()):
            if at(item, (key,)) == name:
                return number
    return index


def _key(manifest: Mapping[str, Any]) -> tuple[str, str]:
    return str(manifest.get("kind")), str(at(manifest, ("metadata", "name")))


@cache
def overlays(root: Path) -> tuple[Overlay, ...]:
    """All of them, rendered. Raises Unreadable."""
    return tuple(_rendered(root, name) for name in OVERLAYS)


def _rendered(root: Path, name: str) -> Overlay:
    folder = root / "cluster/kuberay/overlays" / name
    kustomization = folder / "kustomization.yaml"
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(folder)]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build", str(folder)]
    else:
        raise Unreadable(Fault(kustomization, 1, "to render it, install kubectl 1.27 or later, or kustomize 5"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unreadable(Fault(kustomization, 1, f"kustomize refuses it: {done.stderr.strip()}"))
    sources = {}
    for file in [*sorted((root / "cluster/kuberay/base").glob("*.yaml")), *sorted(folder.glob("*.yaml"))]:
        for each in documents(file):
            if isinstance(each.data, dict) and "kind" in each.data:
                sources[_key(each.data)] = each
    return Overlay(name, folder, tuple(yaml.safe_load_all(done.stdout)), sources)


def check(root: Path) -> Iterator[Fault]:
    """Faults of the files, and of what the overlays are rendered to."""
    for file in sorted(root.glob("cluster/kuberay/**/kustomization.yaml")):
        for each in documents(file):
            yield from each.against(_KUSTOMIZATION)
    for overlay in overlays(root):
        for manifest in overlay.manifests:
            for where, message in _problems(manifest):
                yield overlay.fault(manifest, where, message)
        yield from _references(overlay)


def _problems(manifest: dict[str, Any]) -> Iterator[kuberay.Problem]:
    spec = kuberay.schema(manifest["kind"])
    if spec is None:
        yield from _known_kind(manifest)
        return
    for error in jsonschema.Draft202012Validator(spec).iter_errors(manifest.get("spec")):
        yield from ((("spec", *inner), message) for inner, message in explained(error))
    if manifest["kind"] == "RayService":
        yield from kuberay.problems(manifest, _pod)


def _known_kind(manifest: dict[str, Any]) -> Iterator[kuberay.Problem]:
    """Of a kind that is Kubernetes' own."""
    validator = _validator(
        f"{manifest['kind'].lower()}-{manifest['apiVersion'].replace('.k8s.io', '').replace('/', '-')}"
    )
    if validator is None:
        yield ("kind",), f"Kubernetes {VERSION} has no {manifest['kind']} in {manifest['apiVersion']}"
        return
    for error in validator.iter_errors(manifest):
        yield from explained(error)


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator | None:
    """Of a kind and version; None where there is none. `kubernetes_validate.validate` says one error only."""
    try:
        schema, definitions = (
            schema_contents(f"kubernetes-json-schema/v{VERSION}.0-local-strict/{part}.json", VERSION)
            for part in (name, "_definitions")
        )
    except FileNotFoundError:
        return None
    registry = Resource.from_contents(definitions) @ Registry()
    return jsonschema.Draft202012Validator(schema, registry=registry)


def _pod(template: dict[str, Any]) -> Iterator[kuberay.Problem]:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"} | template.get("metadata", {})}
    yield from _known_kind(pod | {"spec": template.get("spec", {})})


def _references(overlay: Overlay) -> Iterator[Fault]:
    """Names and labels of one manifest in another."""
    service = overlay.ray_service
    cluster = at(service, ("spec", "rayClusterConfig"), {})
    templates = [at(cluster, ("headGroupSpec", "template"), {})]
    templates += [group.get("template", {}) for group in cluster.get("workerGroupSpecs", [])]
    templates += [at(each, ("spec", "template"), {}) for each in overlay.of_kind("StatefulSet")]
    pods = [at(template, ("metadata", "labels"), {}) for template in templates]
    for manifest in overlay.manifests:
        path = _SELECTING.get(manifest["kind"])
        wanted = at(manifest, ("spec", *path, "matchLabels"), {}) if path else {}
        if path and not any(wanted.items() <= labels.items() for labels in pods):
            yield overlay.fault(manifest, ("spec", *path, "matchLabels"), f"no pod has the labels {wanted}")
    ports = {port["name"] for each in templates for box in each["spec"]["containers"] for port in box.get("ports", [])}
    for monitor in overlay.of_kind("PodMonitor"):
        for index, endpoint in enumerate(at(monitor, ("spec", "podMetricsEndpoints"), [])):
            if endpoint.get("port") not in ports:
                where: Where = ("spec", "podMetricsEndpoints", index, "port")
                yield overlay.fault(monitor, where, f"no container has a port {endpoint.get('port')}")
    served = (f"{service['metadata']['name']}-serve-svc", 8000)
    for manifest, where, backend in _backends(overlay):
        if backend != served:
            yield overlay.fault(manifest, where, f"KubeRay's service is {served[0]}, port {served[1]}")
    if not at(service, ("spec", "serveConfigV2")):
        yield Fault(overlay.folder / "kustomization.yaml", 1, "leaves spec.serveConfigV2 empty: what is to run?")


def _backends(overlay: Overlay) -> Iterator[tuple[dict[str, Any], Where, tuple[Any, Any]]]:
    for ingress in overlay.of_kind("Ingress"):
        for i, rule in enumerate(at(ingress, ("spec", "rules"), [])):
            for j, path in enumerate(at(rule, ("http", "paths"), [])):
                where: Where = ("spec", "rules", i, "http", "paths", j, "backend", "service")
                backend = at(path, ("backend", "service"), {})
                yield ingress, where, (backend.get("name"), at(backend, ("port", "number")))
    for route in overlay.of_kind("HTTPRoute"):
        for i, rule in enumerate(at(route, ("spec", "rules"), [])):
            for j, backend in enumerate(rule.get("backendRefs", [])):
                yield route, ("spec", "rules", i, "backendRefs", j), (backend.get("name"), backend.get("port"))
