"""Clusters of virtual machines for `ray up`: Ray's schema, what it lets through, and the clouds' own models."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import googleapiclient
import ray
from botocore.session import Session
from botocore.validate import ParamValidator
from ray.scripts.scripts import start as ray_start

from tools.cluster_check.document import Document, Fault, Where, at, document
from tools.cluster_check.serve import cannot_import

FILES = {"aws": "cluster/aws.yaml", "gcp": "cluster/gcp.yaml"}
_PROVIDER = {
    "type",
    "module",
    "region",
    "availability_zone",
    "cache_stopped_nodes",
    "use_internal_ips",
    "disable_node_updaters",
}
_PROVIDERS = {
    "aws": _PROVIDER | {"security_group", "aws_credentials", "cloudwatch", "disable_launch_config_check"},
    "gcp": _PROVIDER | {"project_id", "gcp_credentials"},
}
_OF_RAY = {"aws": {"SubnetIds"}, "gcp": {"sourceInstanceTemplate", "networkConfig"}}  # in node_config, for Ray itself
_OPTION = re.compile(r"(--[a-z][a-z-]*)")
_ANYBODY = "0.0.0.0/0"


def check(root: Path) -> Iterator[Fault]:
    for provider, name in FILES.items():
        cluster = document(root / name)
        yield from cluster.against(_schema())
        yield from _provider(cluster, provider)
        yield from _commands(cluster)
        yield from _node_types(cluster, provider)


def _schema() -> dict[str, Any]:
    file = Path(ray.__file__).parent / "autoscaler/ray-schema.json"
    return dict(json.loads(file.read_text(encoding="utf-8")))


def _provider(cluster: Document, provider: str) -> Iterator[Fault]:
    settings = cluster.data["provider"]
    for key in settings.keys() - _PROVIDERS[provider]:
        yield cluster.fault(
            ("provider", key), f"Ray reads no such key; it reads {', '.join(sorted(_PROVIDERS[provider]))}"
        )
    if settings.get("type") != "external":
        yield cluster.fault(
            ("provider", "type"), "is to be external: Ray's own provider never turns to on-demand nodes"
        )
    elif problem := cannot_import(settings.get("module", "")):
        yield cluster.fault(("provider", "module"), problem)
    if settings.get("cache_stopped_nodes") is not False:
        yield cluster.fault(
            ("provider", "cache_stopped_nodes"), "is to be false: stopped nodes come back with old settings"
        )
    if _ANYBODY in json.dumps(settings.get("security_group", {})):
        yield cluster.fault(("provider", "security_group"), f"{_ANYBODY} may come in: whoever does runs code")


def _commands(cluster: Document) -> Iterator[Fault]:
    known = {option for parameter in ray_start.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for kind, needed in (
        ("head", ["--autoscaling-config=~/ray_bootstrap_config.yaml", "--metrics-export-port=8080"]),
        ("worker", ["--address=$RAY_HEAD_IP:6379", "--metrics-export-port=8080"]),
    ):
        key = f"{kind}_start_ray_commands"
        starts = [(i, text) for i, text in enumerate(cluster.data.get(key, [])) if "ray start" in text]
        if not starts:
            yield cluster.fault((key,), "starts no Ray")
        for index, command in starts:
            before, _, arguments = command.partition("ray start")
            for wanted, where in [('eval "$(talkray env)"', before), *((each, arguments) for each in needed)]:
                if wanted not in where:
                    yield cluster.fault((key, index), f"lacks {wanted}")
            for option in set(_OPTION.findall(arguments)) - known:
                yield cluster.fault((key, index), f"`ray start` has no option {option}")
    options = " ".join(at(cluster.data, ("docker", "run_options"), []))
    for wanted in ("RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN_PATH=", "--ulimit nofile=65536"):
        if wanted not in options:
            yield cluster.fault(("docker", "run_options"), f"lacks {wanted}")


def _node_types(cluster: Document, provider: str) -> Iterator[Fault]:
    types = cluster.data.get("available_node_types", {})
    head = cluster.data.get("head_node_type")
    if head not in types:
        yield cluster.fault(("head_node_type",), f"is none of {', '.join(types)}")
    floor = 0
    for name, kind in types.items():
        here: Where = ("available_node_types", name)
        yield from _node_config(cluster, provider, here)
        spot = is_spot(at(kind, ("node_config",), {}))
        if name == head:
            if kind.get("resources", {}).get("CPU") != 0 or "GPU" in kind["resources"]:
                yield cluster.fault((*here, "resources"), "the head is to have no slots: {CPU: 0}")
            if spot:
                yield cluster.fault((*here, "node_config"), "a head on spot is lost with all it knows")
            continue
        low, high = kind.get("min_workers", 0), kind.get("max_workers")
        floor += low
        if high is None:
            yield cluster.fault(here, "without max_workers Ray takes the whole cluster's")
        elif low > high:
            yield cluster.fault((*here, "min_workers"), f"{low} is more than max_workers, {high}")
        market = at(kind, ("labels", "market"))
        if market != ("spot" if spot else "on-demand"):
            yield cluster.fault((*here, "labels"), f"market is {market}, node_config says {'' if spot else 'not '}spot")
        if spot and low:
            yield cluster.fault((*here, "min_workers"), "a floor on spot is none")
    if floor > cluster.data.get("max_workers", 0):
        yield cluster.fault(("max_workers",), f"is less than all min_workers together, {floor}")


def is_spot(node_config: Mapping[str, Any]) -> bool:
    """Whether a machine's configuration asks for one that may be taken away."""
    amazon = at(node_config, ("InstanceMarketOptions", "MarketType"))
    google = at(node_config, ("scheduling", "provisioningModel"))
    return "spot" in (amazon, str(google).lower())


def _node_config(cluster: Document, provider: str, here: Where) -> Iterator[Fault]:
    where: Where = (*here, "node_config")
    given = at(cluster.data, where, {})
    config = {key: value for key, value in given.items() if key not in _OF_RAY[provider]}
    if provider == "gcp":
        yield from _google(cluster, where, config, "Instance")
        for key in {"machineType", "disks", "networkInterfaces", "tags"} - config.keys():
            yield cluster.fault(where, f"lacks {key}")
        return
    shape = _run_instances()
    wanted = {"MinCount": 1, "MaxCount": 1} | config
    for problem, name, details in ParamValidator().validate(wanted, shape)._errors:
        inner = [part for part in re.split(r"[.\[\]]", name) if part]
        if problem == "unknown field":
            inner.append(details["unknown_param"])
        parts: Where = tuple(int(part) if part.isdigit() else part for part in inner)
        yield cluster.fault((*where, *parts), f"{problem}, by EC2's model of RunInstances")
    if config.get("InstanceType") not in shape.members["InstanceType"].enum:
        yield cluster.fault((*where, "InstanceType"), f"EC2 has no {config.get('InstanceType')}")
    if not config.get("SecurityGroupIds"):
        yield cluster.fault(where, "without SecurityGroupIds Ray makes a group whose port 22 is open to everybody")
    if at(config, ("MetadataOptions", "HttpTokens")) != "required":
        yield cluster.fault((*where, "MetadataOptions"), "HttpTokens is to be required")


@cache
def _run_instances() -> Any:
    return Session().get_service_model("ec2").operation_model("RunInstances").input_shape


@cache
def _google_schemas() -> dict[str, Any]:
    file = Path(googleapiclient.__file__).parent / "discovery_cache/documents/compute.v1.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))["schemas"])


_JSON_TYPES: dict[str, Any] = {"string": str, "boolean": bool, "object": dict, "array": list, "number": (int, float)}
_JSON_TYPES |= {"integer": int}


def _google(cluster: Document, where: Where, value: Any, name: str | Mapping[str, Any]) -> Iterator[Fault]:
    """Of a value by the discovery document's schema of that name."""
    schema = _google_schemas()[name] if isinstance(name, str) else name
    if "$ref" in schema:
        yield from _google(cluster, where, value, schema["$ref"])
    elif schema.get("format") in ("int64", "uint64") and isinstance(value, int):
        return
    elif not isinstance(value, _JSON_TYPES.get(schema.get("type", ""), object)):
        yield cluster.fault(where, f"is to be {schema['type']}, by Google's model of an instance")
    elif "enum" in schema and value not in schema["enum"]:
        yield cluster.fault(where, f"{value} is none of {', '.join(schema['enum'])}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _google(cluster, (*where, index), item, schema["items"])
    elif isinstance(value, dict) and "properties" in schema:
        for key, item in value.items():
            if key in schema["properties"]:
                yield from _google(cluster, (*where, key), item, schema["properties"][key])
            else:
                yield cluster.fault((*where, key), "unknown field, by Google's model of an instance")
