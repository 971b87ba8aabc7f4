from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tools.experiments.parity.ours import Ours, write_tiny


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By kind: the checkpoint that the golden files were made with, written anew."""
    torch.set_num_threads(1)
    return cache(lambda kind: write_tiny(tmp_path_factory.mktemp(kind) / "checkpoint", kind))


@pytest.fixture(scope="session")
def ours(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], Ours]:
    return cache(lambda kind: Ours(tiny_checkpoint(kind)))
