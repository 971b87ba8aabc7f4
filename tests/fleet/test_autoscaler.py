"""Ray's own autoscaler on a cloud that is not there, driven by what Talkray's production config asks for."""

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.fleet.clouds import REGION, Aws, aws, fake_login, for_this_cloud, ray_up, tags
from tools.experiments.fleet.fleet import CODEC, CODECS, INGRESS, ROOT, TALKER, TALKERS, Fleet, fleet
from tools.experiments.fleet.namespaces import Machine

IDLE_S = 5
REACTION_S = 900.0


@dataclass(slots=True)
class Scaled:
    """A head that `ray up` has prepared, with the autoscaler on it."""

    fleet: Fleet
    cloud: Aws

    def running(self) -> Counter[tuple[str, str]]:
        """Workers by node type and market."""
        return Counter(
            (tags(each)["ray-user-node-type"], each.get("InstanceLifecycle", "on-demand"))
            for each in self.cloud.instances()
            if tags(each)["ray-node-type"] == "worker"
        )


@pytest.fixture(scope="module")
def scaled(possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    folder = tmp_path_factory.mktemp("autoscaler")
    with fleet() as made, aws(folder, made.net.gateway) as cloud:
        login = fake_login(folder, "REGISTRY/talkray:1.0.0rc1-cpu")
        # The addresses of the cloud's machines lead nowhere: no session waits for one that ends.
        file = for_this_cloud(cloud, folder, file_mounts={})
        ray_up(cloud, login, file)
        (key,) = (cloud.home / ".ssh").glob("*.pem")  # the head's own, which `ray up` has sent there
        shutil.copy(key, cloud.home / "ray_bootstrap_key.pem")
        (head,) = cloud.instances()
        made.environment |= cloud.environment | login.path
        made.head_environment = {
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": head["InstanceId"],
            "RAY_NODE_TYPE_NAME": "head",
        }
        made.start_head(f"--autoscaling-config={_idle_sooner(login.bootstrap)}")
        yield Scaled(made, cloud)


def _idle_sooner(bootstrap: Path) -> Path:
    config = yaml.safe_load(bootstrap.read_text())
    for node_type in config["available_node_types"].values():
        node_type["idle_timeout_s"] = IDLE_S
    bootstrap.write_text(yaml.safe_dump(config))
    return bootstrap


def production(fleet: Fleet) -> dict[str, object]:
    """As it is, but for the weights: what asks for nodes are numbers of replicas, slots and labels."""
    config = yaml.safe_load((ROOT / "cluster/serve/production.yaml").read_text())
    args = config["applications"][0]["args"]
    args["model"] = "embedded"
    args["api"]["access"]["keys_file"] = str(fleet.scratch / "keys.json")
    # A replica that waits for a node is asked for until it has been stopped, which takes as long as if it spoke.
    assert [each["name"] for each in config["applications"][0]["deployments"]] == [INGRESS, TALKER, CODEC]
    for deployment in config["applications"][0]["deployments"]:
        deployment["graceful_shutdown_timeout_s"] = 1
    return dict(config)


def test_floors_are_on_demand_and_the_rest_is_spot(scaled: Scaled) -> None:
    """Two talkers, 16 codec replicas of two cores and two ingress replicas: a node of each kind above the floors."""
    fleet, cloud = scaled.fleet, scaled.cloud
    floors = Counter({("talker", "on-demand"): 1, ("codec", "on-demand"): 2})
    fleet.wait(lambda: scaled.running() == floors, "the floors", REACTION_S)
    fleet.wait(lambda: fleet.takes(production(fleet)), "Serve")
    wanted = floors + Counter({("talker-spot", "spot"): 1, ("codec-spot", "spot"): 1})
    took_s = fleet.wait(lambda: scaled.running() >= wanted, "nodes for what cannot be placed", REACTION_S)
    print(f"nodes for Talkray's demand after {took_s:.0f} s: {dict(scaled.running())}")
    assert scaled.running() == wanted
    types = yaml.safe_load((ROOT / "cluster/aws.yaml").read_text())["available_node_types"]
    for instance in cloud.instances():
        assert instance["InstanceType"] == types[tags(instance)["ray-user-node-type"]]["node_config"]["InstanceType"]
        assert instance["Placement"]["AvailabilityZone"].startswith(REGION)


def test_idle_nodes_go_again(scaled: Scaled) -> None:
    """Those above the floors; Ray waits an hour for a node that does not join, so these do."""
    fleet, cloud = scaled.fleet, scaled.cloud
    fleet.ask("deploy", {"applications": [], "proxy_location": "EveryNode", "http_options": {"host": "0.0.0.0"}})
    fleet.wait(lambda: not fleet.ask("applications"), "the end of the application")
    spot = [each for each in cloud.instances() if each.get("InstanceLifecycle") == "spot"]
    assert len(spot) == 2
    started_s = time.monotonic()
    for instance in spot:
        _join(fleet, tags(instance)["ray-user-node-type"], instance["InstanceId"])
    floors = Counter({("talker", "on-demand"): 1, ("codec", "on-demand"): 2})
    fleet.wait(lambda: scaled.running() == floors, "the end of idle nodes", REACTION_S)
    print(f"idle nodes have gone {time.monotonic() - started_s:.0f} s after the first one was started")


def _join(fleet: Fleet, node_type: str, instance: str) -> Machine:
    """The raylet that an instance would have started."""
    pool = TALKERS if node_type.startswith(TALKERS) else CODECS
    return fleet.add(node_type, pool, market="spot", RAY_CLOUD_INSTANCE_ID=instance, RAY_NODE_TYPE_NAME=node_type)


def test_where_spot_is_refused_nodes_are_on_demand(scaled: Scaled) -> None:
    fleet, cloud = scaled.fleet, scaled.cloud
    cloud.refuse_spot.touch()
    before = len(cloud.launches())
    fleet.wait(lambda: fleet.takes(production(fleet)), "Serve")
    wanted = Counter({("talker-spot", "on-demand"): 1, ("codec-spot", "on-demand"): 1})
    took_s = fleet.wait(lambda: scaled.running() >= wanted, "nodes on demand", REACTION_S)
    asked = cloud.launches()[before:]
    print(f"spot refused {sum(each['refused'] for each in asked)} times, on demand after {took_s:.0f} s")
    assert {each["market"] for each in asked if each["refused"]} == {"spot"}
    # The same nodes once: what was refused is not asked for on and on.
    assert sum(scaled.running().values()) == 5
