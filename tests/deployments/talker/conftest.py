from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from deployments.config import TalkerConfig
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from tests.deployments.interpreter import INTERPRETED

HERE = Path(__file__).parent
OF_TRITON = (HERE / "kernels", HERE / "sampling" / "test_triton_sampler.py")
CONFIG = TalkerConfig(device="cpu", max_num_seqs=4, max_model_len=512)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton runs on a GPU, or on a CPU in its interpreter: on a GPU its tests are part of `-m gpu`."""
    for item in items:
        if not INTERPRETED and any(item.path.is_relative_to(place) for place in OF_TRITON):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def engine_of(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], Engine]:
    """By kind of checkpoint: an engine, idle as each test has to leave it."""
    return cache(lambda name: build_engine(tiny_checkpoint(name), CONFIG))


@pytest.fixture
def engine(engine_of: Callable[[str], Engine]) -> Engine:
    return engine_of("CustomVoice")
