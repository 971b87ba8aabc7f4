"""Ray node provider for AWS that starts an on-demand instance if a spot request is rejected.

Ray 2.60's autoscaler retries a rejected spot type every five seconds and never switches to another type, because it
treats only timeouts as a shortage. Set this provider in a cluster's file: `provider: {type: external, module:
serve_app.nodes.aws.AwsNodes}`.
"""

import logging
from typing import Any

from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler.node_launch_exception import NodeLaunchException

logger = logging.getLogger(__name__)

_MARKET = "InstanceMarketOptions"
# EC2 error codes: no spot capacity in any of the zones tried, or the account's spot limit is reached.
_REFUSALS = frozenset(
    ("InsufficientInstanceCapacity", "MaxSpotInstanceCountExceeded", "SpotMaxPriceTooLow", "UnfulfillableCapacity")
)


class AwsNodes(AWSNodeProvider):  # type: ignore[misc]
    """AWS nodes. On-demand instances keep the name and labels of the node type, including `market: spot`."""

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        """Create nodes; Ray tries every subnet. Raises NodeLaunchException if on-demand requests are rejected too."""
        try:
            created: dict[str, Any] = super().create_node(node_config, tags, count)
        except NodeLaunchException as refusal:
            if _MARKET not in node_config or refusal.category not in _REFUSALS:
                raise
            logger.warning("spot instances are refused (%s), starting %d on-demand", refusal.category, count)
            on_demand = {name: value for name, value in node_config.items() if name != _MARKET}
            created = super().create_node(on_demand, tags, count)
        return created
