"""The fixtures of the packages that the tools work on."""

from tests.deployments.codec.conftest import config
from tests.deployments.conftest import anyio_backend, device, tiny_checkpoint

__all__ = ["anyio_backend", "config", "device", "tiny_checkpoint"]
