"""The fixtures of the packages that the tools work on."""

from tests.deployments.codec.conftest import config
from tests.deployments.conftest import device, tiny_checkpoint

__all__ = ["config", "device", "tiny_checkpoint"]
