from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from deployments.serving import metrics
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from tests.deployments.interpreter import INTERPRETED, accept_numpy_scalars

if INTERPRETED:
    accept_numpy_scalars()


@pytest.fixture
def device() -> torch.device:
    """Where Triton kernels run: on a GPU, or on CPU tensors in Triton's interpreter."""
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a GPU or TRITON_INTERPRET=1: make kernels")
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, dict[str, str]]]:
    """What reaches Talkray's metrics in place of Ray: names without their prefix, values, tags."""
    records: list[tuple[str, float, dict[str, str]]] = []
    for instrument in metrics.INSTRUMENTS:
        name = instrument.name.removeprefix("talkray_")

        def record(value: float, name: str = name, **tags: str) -> None:
            if value or not name.endswith("_total"):
                records.append((name, value, tags))

        monkeypatch.setattr(instrument, "record", record)
    return records


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


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("CustomVoice")
