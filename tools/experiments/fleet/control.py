"""Operator commands for Serve as JSON lines. Runs next to the head, because Ray requires drivers to run on nodes."""

import json
import sys
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema


def deploy(config: dict[str, Any]) -> None:
    """Deploy like `serve deploy`, but without Ray's dashboard."""
    schema = ServeDeploySchema.model_validate(config)
    serve.start(proxy_location=schema.proxy_location, http_options=schema.http_options.model_dump())
    _get_global_client().deploy_apps(schema)


def applications() -> dict[str, Any]:
    """Return status, message and deployments of each application, with the state, node and process of replicas."""
    details = _get_global_client().get_serve_details()["applications"]
    return {
        name: {
            "status": application["status"],
            "message": application["message"],
            "deployments": {
                deployment: {
                    "message": entry["message"],
                    "replicas": [
                        {
                            "id": each["replica_id"],
                            "state": each["state"],
                            "node": each.get("node_ip"),  # None before the replica is placed
                            "pid": each.get("pid"),
                        }
                        for each in entry["replicas"]
                    ],
                }
                for deployment, entry in application["deployments"].items()
            },
        }
        for name, application in details.items()
    }


def nodes() -> list[dict[str, Any]]:
    """Return address, id, labels, resources and liveness of each node, including dead nodes."""
    return [
        {
            "address": node["NodeManagerAddress"],
            "id": node["NodeID"],
            "labels": node["Labels"],
            "resources": node["Resources"],
            "is_alive": node["Alive"],
        }
        for node in ray.nodes()
    ]


def main() -> None:
    """Process commands until the end of the input."""
    commands = {"deploy": deploy, "applications": applications, "nodes": nodes}
    out, sys.stdout = sys.stdout, sys.stderr
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="warning", namespace="serve")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": commands[name](*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer, default=str), file=out, flush=True)


if __name__ == "__main__":
    main()
