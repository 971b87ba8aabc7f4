from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from deployments.config import TalkerConfig
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine

CONFIG = TalkerConfig(device="cpu", max_num_seqs=4, max_model_len=512, kv_block_size=8)


@pytest.fixture(scope="session")
def engine_of(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], Engine]:
    """By kind of checkpoint: an engine, idle as each test has to leave it."""
    return cache(lambda name: build_engine(tiny_checkpoint(name), CONFIG))


@pytest.fixture
def engine(engine_of: Callable[[str], Engine]) -> Engine:
    return engine_of("CustomVoice")
