"""`ray up` of the cluster files, and Ray's autoscaler, on clouds that are not there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.fleet.clouds import Aws, Login, aws, fake_login, for_this_cloud, ray_up, tags


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aws]:
    with aws(tmp_path_factory.mktemp("aws")) as cloud:
        yield cloud


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Login:
    return fake_login(tmp_path_factory.mktemp("bin"), "REGISTRY/talkray:1.0.0rc1-cpu")


@pytest.fixture(scope="module")
def cluster_file(cloud: Aws, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return for_this_cloud(cloud, tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def up(cloud: Aws, login: Login, cluster_file: Path) -> None:
    ray_up(cloud, login, cluster_file)


def test_ray_up_starts_a_head_that_nobody_but_the_group_reaches(cloud: Aws, up: None, cluster_file: Path) -> None:
    config = yaml.safe_load(cluster_file.read_text())
    (head,) = cloud.instances()
    node = config["available_node_types"]["head"]["node_config"]
    assert head["InstanceType"] == node["InstanceType"]
    assert head.get("InstanceLifecycle") is None
    assert tags(head)["ray-user-node-type"] == "head"
    assert tags(head)["ray-cluster-name"] == config["cluster_name"]
    assert [group["GroupId"] for group in head["SecurityGroups"]] == node["SecurityGroupIds"]
    groups = cloud.client().describe_security_groups(GroupIds=node["SecurityGroupIds"])["SecurityGroups"]
    assert [rule for group in groups for rule in group["IpPermissions"]] == []  # Ray has opened nothing


def test_ray_up_starts_ray_in_the_container(up: None, login: Login, cluster_file: Path) -> None:
    config = yaml.safe_load(cluster_file.read_text())
    sent = "\n".join(login.commands)
    start = config["head_start_ray_commands"][-1]
    for part in ("docker pull", config["docker"]["image"], "ray start --head", "talkray env"):
        assert part in sent, part
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start
    caught = yaml.safe_load(login.bootstrap.read_text())
    assert caught["worker_start_ray_commands"] == config["worker_start_ray_commands"]
