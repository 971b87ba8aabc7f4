"""Ray's provider of AWS nodes, which starts an on-demand instance if spot is refused.

Ray 2.60's autoscaler asks for a refused spot type again every five seconds and never turns to another one: it counts
requests that time out as a shortage, not refusals. Name this provider in a cluster's file:
`provider: {type: external, module: serve_app.nodes.aws.AwsNodes}`.
"""

import logging
from typing import Any

from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler.node_launch_exception import NodeLaunchException

logger = logging.getLogger(__name__)

_MARKET = "InstanceMarketOptions"
# Error codes of EC2: no spot capacity in any zone that was tried, or the account's spot limit is reached.
_REFUSALS = frozenset(
    ("InsufficientInstanceCapacity", "MaxSpotInstanceCountExceeded", "SpotMaxPriceTooLow", "UnfulfillableCapacity")
)


class AwsNodes(AWSNodeProvider):  # type: ignore[misc]
    """A node keeps its type's name and labels, including `market: spot`, however it was bought."""

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        """Create nodes; Ray tries every subnet. Raises NodeLaunchException if on-demand is refused too."""
        try:
            created: dict[str, Any] = super().create_node(node_config, tags, count)
        except NodeLaunchException as refusal:
            if _MARKET not in node_config or refusal.category not in _REFUSALS:
                raise
            logger.warning("spot is refused (%s): %d on-demand", refusal.category, count)
            on_demand = {name: value for name, value in node_config.items() if name != _MARKET}
            created = super().create_node(on_demand, tags, count)
        return created
