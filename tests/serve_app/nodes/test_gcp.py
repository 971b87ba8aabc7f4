"""The provider of `cluster/gcp.yaml`, with Google's own client, on an API that is not there. No login, no networks."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httplib2
import pytest
import yaml
from googleapiclient import discovery
from ray.autoscaler._private.gcp import config as gcp_config
from ray.autoscaler._private.gcp.node import GCPCompute

from serve_app.nodes.gcp import GcpNodes

CLUSTER = Path(__file__).parents[3] / "cluster/gcp.yaml"


@dataclass(slots=True)
class Google:
    """Compute Engine behind Google's own client: instances, operations, and no spot where `refuses_spot`."""

    refuses_spot: bool = False
    error: str = "ZONE_RESOURCE_POOL_EXHAUSTED"  # why
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)
    inserted: list[dict[str, Any]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)

    def request(self, uri: str, method: str = "GET", body: Any = None, **_: Any) -> tuple[Any, bytes]:
        """As httplib2.Http does."""
        answer = self._answer(uri.partition("?")[0], method, json.loads(body) if body else {})
        return httplib2.Response({"status": "200", "content-type": "application/json"}), json.dumps(answer).encode()

    def close(self) -> None:
        """As httplib2.Http does."""

    def _answer(self, uri: str, method: str, body: dict[str, Any]) -> dict[str, Any]:
        name = uri.rpartition("/")[2]
        if "/operations/" in uri:
            error = {"error": {"errors": [{"code": self.error}]}} if name in self.failed else {}
            return {"name": name, "status": "DONE", **error}
        if method == "POST" and uri.endswith("/instances"):
            return {"name": self._insert(body), "status": "RUNNING"}
        if method == "DELETE":
            del self.instances[name]
            return {"name": f"delete-{name}", "status": "RUNNING"}
        if uri.endswith("/instances"):
            return {"items": list(self.instances.values())}
        return self.instances[name]

    def _insert(self, body: dict[str, Any]) -> str:
        self.inserted.append(body)
        operation = f"insert-{len(self.inserted)}"
        scheduling = body.get("scheduling", {})
        if self.refuses_spot and (scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible")):
            self.failed.add(operation)
        else:
            self.instances[body["name"]] = body | {"status": "RUNNING", "labelFingerprint": "x"}
        return operation


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Google:
    google, build = Google(), discovery.build

    def without_login(name: str, version: str, **_: Any) -> Any:
        return build(name, version, http=google, static_discovery=True)

    monkeypatch.setattr(gcp_config.discovery, "build", without_login)
    monkeypatch.setattr(GCPCompute, "get_new_authorized_http", lambda self, http: google)
    return google


def nodes_of(config: dict[str, Any]) -> GcpNodes:
    return GcpNodes(config["provider"], config["cluster_name"])


def launch(config: dict[str, Any], node_type: str, count: int) -> dict[str, Any]:
    names = {"ray-node-name": f"ray-{node_type}", "ray-node-type": "worker", "ray-user-node-type": node_type}
    node_config = config["available_node_types"][node_type]["node_config"]
    return nodes_of(config).create_node(node_config, names, count)


@pytest.fixture
def config() -> dict[str, Any]:
    return dict(yaml.safe_load(CLUSTER.read_text().replace("PROJECT", "a-project")))


def test_the_file_names_this_provider(config: dict[str, Any]) -> None:
    assert config["provider"]["module"] == f"{GcpNodes.__module__}.{GcpNodes.__name__}"


def test_nodes_come_and_go_with_the_labels_by_which_ray_finds_them(google: Google, config: dict[str, Any]) -> None:
    assert len(launch(config, "talker-spot", 2)) == 2
    for body in google.inserted:
        assert body["scheduling"]["provisioningModel"] == "SPOT"
        assert body["labels"]["ray-user-node-type"] == "talker-spot"
        assert body["labels"]["ray-cluster-name"] == config["cluster_name"]
        assert body["machineType"].endswith("g2-standard-8")
    nodes = nodes_of(config)
    names = nodes.non_terminated_nodes({"ray-node-type": "worker"})
    assert set(names) == set(google.instances)
    nodes.terminate_nodes(names)
    assert google.instances == {}


@pytest.mark.parametrize(("error", "spot"), [
    ("ZONE_RESOURCE_POOL_EXHAUSTED", {"provisioningModel": "SPOT", "instanceTerminationAction": "STOP"}),
    ("QUOTA_EXCEEDED", {"preemptible": True}), ("STOCKOUT", {"preemptible": True}),
])  # fmt: skip
def test_standard_replaces_spot(google: Google, config: dict[str, Any], error: str, spot: dict[str, object]) -> None:
    google.refuses_spot, google.error = True, error
    config["available_node_types"]["codec-spot"]["node_config"]["scheduling"] = {"automaticRestart": False, **spot}
    assert len(launch(config, "codec-spot", 2)) == 2
    asked = [body["scheduling"] for body in google.inserted]
    assert asked == [{"automaticRestart": False, **spot}, {"automaticRestart": False}] * 2
    assert [each["labels"]["ray-user-node-type"] for each in google.instances.values()] == ["codec-spot"] * 2


def test_another_error_is_no_refusal(google: Google, config: dict[str, Any]) -> None:
    google.refuses_spot, google.error = True, "PERMISSION_DENIED"
    with pytest.raises(Exception, match="PERMISSION_DENIED"):
        launch(config, "codec-spot", 1)
    assert len(google.inserted) == 1
