"""Names of functions and classes that are imported when they are needed: a row of a registry costs nothing else."""

from importlib import import_module
from typing import Any


def late(name: str) -> Any:
    """What a name such as "package.module:Class" means."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
