from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from deployments.random_checkpoint import Options, write_checkpoint
from deployments.released import SHAPES


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By released name, such as "CustomVoice": a checkpoint of that kind with tiny layers and random weights."""
    torch.set_num_threads(1)

    @cache
    def write(name: str) -> Path:
        directory = tmp_path_factory.mktemp("tiny") / name
        write_checkpoint(directory, SHAPES[f"tiny-{name}"], Options(dtype=torch.float32))
        return directory

    return write
