"""On-demand where spot is refused. `make fleet` has all of it, with Ray's autoscaler and moto."""

from typing import Any

import pytest
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler.node_launch_exception import NodeLaunchException

from serve_app.nodes.aws import AwsNodes

SPOT = {"InstanceType": "g6e.2xlarge", "InstanceMarketOptions": {"MarketType": "spot"}}
ON_DEMAND = {"InstanceType": "g6e.2xlarge"}


def launch(node_config: dict[str, Any]) -> dict[str, Any]:
    nodes = object.__new__(AwsNodes)  # without a client
    return nodes.create_node(node_config, {"ray-user-node-type": "talker-spot"}, 3)


def refuse(monkeypatch: pytest.MonkeyPatch, category: str, *, all_of_it: bool) -> list[dict[str, Any]]:
    """What EC2 is asked for from now on."""
    asked = []

    def create_node(self: object, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        asked.append(node_config)
        if all_of_it or "InstanceMarketOptions" in node_config:
            raise NodeLaunchException(category, "no", None)
        return {f"i-{number}": tags for number in range(count)}

    monkeypatch.setattr(AWSNodeProvider, "create_node", create_node)
    return asked


def test_refused_spot_is_asked_for_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = refuse(monkeypatch, "InsufficientInstanceCapacity", all_of_it=False)
    assert len(launch(SPOT)) == 3
    assert asked == [SPOT, ON_DEMAND]


@pytest.mark.parametrize(
    ("node_config", "category", "times"),
    [
        (SPOT, "InsufficientInstanceCapacity", 2),  # neither is to be had
        (SPOT, "UnauthorizedOperation", 1),
        (ON_DEMAND, "InsufficientInstanceCapacity", 1),
    ],
)
def test_others_fail(monkeypatch: pytest.MonkeyPatch, node_config: dict[str, Any], category: str, times: int) -> None:
    asked = refuse(monkeypatch, category, all_of_it=True)
    with pytest.raises(NodeLaunchException) as caught:
        launch(node_config)
    assert caught.value.category == category
    assert len(asked) == times
