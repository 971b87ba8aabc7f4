"""Ray Serve's configuration: its schema, the keys that it would ignore, our settings in it, and what is imported."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from deployments.errors import StartError
from serve_app.cli import ray_settings
from serve_app.config import AppConfig
from tools.cluster_check.document import Document, Fault, Where, at, document, text_fault

_DEPLOYMENTS = {"Ingress", "CodecDecoder", "Talker"}
_IMPORTED = ("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH")
# The same file twice: each stands where its reader looks.
_COPIES = {
    "cluster/serve/one-gpu.yaml": "serve_app/cli/one-gpu.yaml",
    "cluster/kuberay/overlays/large/serve.yaml": "cluster/serve/production.yaml",
}


def files(root: Path) -> list[Path]:
    return sorted([*root.glob("cluster/serve/*.yaml"), *root.glob("cluster/kuberay/overlays/*/serve.yaml")])


def app_config(file: Path) -> AppConfig | None:
    """Our settings in one of them, if they are valid."""
    try:
        return AppConfig.model_validate(at(document(file).data, ("applications", 0, "args"), {}))
    except ValidationError:
        return None


def check(root: Path) -> Iterator[Fault]:
    for file in files(root):
        yield from _config(document(file))
    for copy, original in _COPIES.items():
        ours, theirs = (root / name for name in (copy, original))
        if not ours.is_file() or ours.read_bytes() != theirs.read_bytes():
            pair = zip(*(file.read_text(encoding="utf-8").splitlines() for file in (ours, theirs)), strict=False)
            line = next((number for number, (a, b) in enumerate(pair, 1) if a != b), 1)
            yield Fault(ours, line, f"is to be a copy of {original}, and differs from it here")
    for name in _IMPORTED:
        path = (ray_settings.TUNED | ray_settings.LOCAL)[name]
        if problem := cannot_import(path):
            yield text_fault(root / "serve_app/cli/ray_settings.py", name, problem)


def _config(config: Document) -> Iterator[Fault]:
    yield from _model(config, ServeDeploySchema, ())
    yield from _unknown(config, ServeDeploySchema, ())
    yield from _unknown(config, HTTPOptionsSchema, ("http_options",))
    applications = at(config.data, ("applications",), [])
    for index, application in enumerate(applications if isinstance(applications, list) else []):
        here: Where = ("applications", index)
        yield from _unknown(config, ServeApplicationSchema, here)
        for where, path in _import_paths(application, here):
            if problem := cannot_import(path):
                yield config.fault(where, problem)
        for number, deployment in enumerate(at(application, ("deployments",), [])):
            yield from _unknown(config, DeploymentSchema, (*here, "deployments", number))
            if at(deployment, ("name",)) not in _DEPLOYMENTS:
                yield config.fault(
                    (*here, "deployments", number, "name"), f"there are only {', '.join(sorted(_DEPLOYMENTS))}"
                )
        yield from _args(config, here)


def _args(config: Document, here: Where) -> Iterator[Fault]:
    args: Where = (*here, "args")
    yield from _model(config, AppConfig, args)
    try:
        settings = AppConfig.model_validate(at(config.data, args, {}))
        settings.api.access.for_host(at(config.data, ("http_options", "host")))
    except StartError as error:
        yield config.fault(("http_options", "host"), str(error))
    except ValidationError:  # said above
        return
    for name, pool, scaling in (
        ("talker", settings.talker_pool, settings.talker_scaling),
        ("codec", settings.codec_pool, settings.codec_scaling),
    ):
        if scaling and not scaling.min_replicas <= pool.replicas <= scaling.max_replicas:
            yield config.fault(
                (*args, f"{name}_pool", "replicas"),
                f"{pool.replicas} at the start is not within {scaling.min_replicas} to {scaling.max_replicas}",
            )
    if settings.codec.workers > max(1, settings.codec_pool.num_cpus):
        yield config.fault((*args, "codec", "workers"), "more workers than codec_pool.num_cpus")


def _model(config: Document, model: type[BaseModel], where: Where) -> Iterator[Fault]:
    try:
        model.model_validate(at(config.data, where, {}))
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            yield config.fault((*where, *problem["loc"]), problem["msg"])


def _unknown(config: Document, model: type[BaseModel], where: Where) -> Iterator[Fault]:
    """Serve ignores keys that it does not know."""
    value = at(config.data, where, {})
    for key in value.keys() - model.model_fields.keys() if isinstance(value, dict) else ():
        yield config.fault((*where, key), f"Serve knows no such key; it has {', '.join(sorted(model.model_fields))}")


def _import_paths(value: Any, where: Where) -> Iterator[tuple[Where, str]]:
    """Whatever a key that is named so holds, at any depth."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        if isinstance(inner, str) and str(key) in ("import_path", "policy_function", "exporter_import_path"):
            yield (*where, key), inner
        else:
            yield from _import_paths(inner, (*where, key))


def cannot_import(path: str) -> str | None:
    """Why `module:name`, or `module.name`, cannot be imported."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        return f"{path} cannot be imported: {error}"
    return None
