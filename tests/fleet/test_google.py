"""The provider of `cluster/gcp.yaml`, with Google's own client, on an API that is not there. No login, no networks."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from googleapiclient import discovery
from ray.autoscaler._private.gcp import config as gcp_config
from ray.autoscaler._private.gcp.node import GCPCompute

from serve_app.gcp_nodes import Nodes
from tests.fleet.clouds import Google

CLUSTER = Path(__file__).parents[2] / "cluster/gcp.yaml"


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Google:
    google, build = Google(), discovery.build

    def without_login(name: str, version: str, **_: Any) -> Any:
        return build(name, version, http=google, static_discovery=True)

    monkeypatch.setattr(gcp_config.discovery, "build", without_login)
    monkeypatch.setattr(GCPCompute, "get_new_authorized_http", lambda self, http: google)
    return google


def nodes_of(config: dict[str, Any]) -> Nodes:
    return Nodes(config["provider"], config["cluster_name"])


def launch(config: dict[str, Any], node_type: str, count: int) -> dict[str, Any]:
    names = {"ray-node-name": f"ray-{node_type}", "ray-node-type": "worker", "ray-user-node-type": node_type}
    node_config = config["available_node_types"][node_type]["node_config"]
    return nodes_of(config).create_node(node_config, names, count)


@pytest.fixture
def config() -> dict[str, Any]:
    return dict(yaml.safe_load(CLUSTER.read_text().replace("PROJECT", "a-project")))


def test_the_file_names_this_provider(config: dict[str, Any]) -> None:
    assert config["provider"]["module"] == f"{Nodes.__module__}.{Nodes.__name__}"


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


def test_refused_spot_is_asked_for_once_each_and_comes_as_standard(google: Google, config: dict[str, Any]) -> None:
    google.refuses_spot = True
    assert len(launch(config, "codec-spot", 2)) == 2
    models = [body["scheduling"].get("provisioningModel") for body in google.inserted]
    assert models == ["SPOT", None, "SPOT", None]
    assert [each["labels"]["ray-user-node-type"] for each in google.instances.values()] == ["codec-spot"] * 2
    assert not any("instanceTerminationAction" in each["scheduling"] for each in google.instances.values())


def test_another_error_is_no_refusal(google: Google, config: dict[str, Any]) -> None:
    google.refuses_spot, google.error = True, "PERMISSION_DENIED"
    with pytest.raises(Exception, match="PERMISSION_DENIED"):
        launch(config, "codec-spot", 1)
    assert len(google.inserted) == 1
