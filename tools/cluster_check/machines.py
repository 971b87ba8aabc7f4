"""Check machine clusters for `ray up` against Ray's schema, the options of `ray start`, and the clouds' API models."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import googleapiclient
import jsonschema
import ray
from botocore.session import Session
from botocore.validate import ParamValidator
from ray.scripts.scripts import start as ray_start
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from tools.cluster_check.document import against, document, rules
from tools.cluster_check.serve import cannot_import

FILES = {"aws": "cluster/aws.yaml", "gcp": "cluster/gcp.yaml"}
_FOR_RAY = {"SubnetIds", "sourceInstanceTemplate", "networkConfig"}  # keys of node_config that only Ray reads


def check(root: Path) -> Iterator[str]:
    ray_schema = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text(encoding="utf-8"))
    options = {option for parameter in ray_start.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for cloud, file in FILES.items():
        cluster, name = document(root / file), str(root / file)
        yield from against(name, cluster, ray_schema)
        yield from rules("machines", name, cluster)
        yield from rules(cloud, name, cluster)
        yield from (f"{name}: {fault}" for fault in cannot_import(cluster["provider"].get("module", "")))
        for command in cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]:
            for option in set(re.findall(r"--[a-z][a-z-]*", command.partition("ray start")[2])) - options:
                yield f"{name}: `ray start` has no option {option}"
        for key, kind in cluster["available_node_types"].items():
            config = {key: value for key, value in kind["node_config"].items() if key not in _FOR_RAY}
            yield from (f"{name}: {key}: {fault}" for fault in (_amazon if cloud == "aws" else _google)(config))


def _amazon(config: dict[str, Any]) -> Iterator[str]:
    """Check a node against EC2's model of RunInstances."""
    shape = _run_instances()
    found = ParamValidator().validate({"MinCount": 1, "MaxCount": 1} | config, shape)
    if found.has_errors():
        yield " ".join(found.generate_report().split())
    if config.get("InstanceType") not in shape.members["InstanceType"].enum:
        yield f"EC2 has no {config.get('InstanceType')}"


@cache
def _run_instances() -> Any:
    return Session().get_service_model("ec2").operation_model("RunInstances").input_shape


def _google(config: dict[str, Any]) -> Iterator[str]:
    """Check a node against Google's model of an instance."""
    for error in _instance().iter_errors(config):
        yield f"{error.json_path}: {error.message}"


@cache
def _instance() -> jsonschema.Draft202012Validator:
    file = Path(googleapiclient.__file__).parent / "discovery_cache/documents/compute.v1.json"
    schemas = json.loads(file.read_text(encoding="utf-8"), object_hook=_strict)["schemas"]
    resources = [(name, DRAFT202012.create_resource(schema)) for name, schema in schemas.items()]
    return jsonschema.Draft202012Validator({"$ref": "Instance"}, registry=Registry().with_resources(resources))


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Convert a schema of a discovery document to a strict JSON Schema, which accepts long integers as numbers."""
    if isinstance(schema.get("properties"), dict):
        schema["additionalProperties"] = False
    if schema.get("format") in ("int64", "uint64"):
        schema["type"] = ["string", "integer"]
    return {key: value for key, value in schema.items() if key != "id" or not isinstance(value, str)}
