"""Ray node provider for Google Cloud that starts a standard instance if a spot request is rejected (see aws.py).

Set this provider in a cluster's file: `provider: {type: external, module: serve_app.nodes.gcp.GcpNodes}`.
"""

import logging
from typing import Any

from ray.autoscaler._private.gcp.node_provider import GCPNodeProvider

logger = logging.getLogger(__name__)

# Strings found in the errors of Compute Engine operations.
_REFUSALS = ("ZONE_RESOURCE_POOL_EXHAUSTED", "QUOTA_EXCEEDED", "STOCKOUT")
# Fields that request a spot instance. Older configs use `preemptible`.
_SPOT = ("provisioningModel", "preemptible", "instanceTerminationAction")


class GcpNodes(GCPNodeProvider):  # type: ignore[misc]
    """Google Cloud nodes. Standard instances keep the name and labels of the node type."""

    def create_node(self, base_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        """Create nodes one at a time, because some may be rejected. Raises Ray's Exception if standard requests are
        rejected too.
        """
        return {name: result for _ in range(count) for name, result in self._create(base_config, tags).items()}

    def _create(self, base_config: dict[str, Any], tags: dict[str, str]) -> dict[str, Any]:
        try:
            created: dict[str, Any] = super().create_node(base_config, tags, 1)
        except Exception as refusal:  # Ray does not raise a specific class
            if not _is_spot(base_config) or not any(words in str(refusal) for words in _REFUSALS):
                raise
            logger.warning("spot instances are refused (%s), starting a standard instance", refusal)
            created = super().create_node(_standard(base_config), tags, 1)
        return created


def _is_spot(base_config: dict[str, Any]) -> bool:
    scheduling = base_config.get("scheduling", {})
    return scheduling.get("provisioningModel") == "SPOT" or bool(scheduling.get("preemptible"))


def _standard(base_config: dict[str, Any]) -> dict[str, Any]:
    scheduling = {name: value for name, value in base_config["scheduling"].items() if name not in _SPOT}
    return base_config | {"scheduling": scheduling}
