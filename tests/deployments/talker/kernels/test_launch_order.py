"""The order of launches under programmatic dependent launch (deployments/gpu/launch.py), in Triton's interpreter.

A kernel that is launched early may read, before it waits, what the kernel before it does not write. Addresses tell:
none that a kernel reads early may be one that the kernel launched just before it writes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: make kernels installs it")

from triton.runtime import interpreter

from deployments.gpu import launch
from deployments.talker.kernels import matmul
from deployments.talker.kernels.matmul import Product, like_rows
from deployments.talker.model.talker import Talker
from deployments.talker.networks import fused_networks
from tests.deployments.interpreter import INTERPRETED
from tests.deployments.talker.kernels.test_fused_networks import frames, runner
from tests.deployments.talker.kernels.test_matmul import DOT

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: make kernels"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@dataclass
class Launch:
    """What one kernel did, by the address of each element."""

    kernel: str
    is_early: bool  # launched while the kernel before it runs
    has_waited: bool = False  # the program that runs now
    early_reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """All launches from here on, of networks that are launched early. A program that does not wait fails."""
    made: list[Launch] = []

    def patched(owner: Any, name: str, before: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def both(*args: Any, **options: Any) -> Any:
            before(*args, **options)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, both)

    def launched(executor: Any, *args: Any, launch_pdl: bool = False, **options: Any) -> None:
        made.append(Launch(executor.fn.__name__, launch_pdl))

    def began(*place: object) -> None:
        made[-1].has_waited = not made[-1].is_early

    def waited(*args: object, **options: object) -> None:
        made[-1].has_waited = True

    def read(builder: object, ptrs: Any, mask: Any, *more: object, **options: object) -> None:
        if not made[-1].has_waited:
            made[-1].early_reads.update(np.broadcast_to(ptrs.data, mask.data.shape)[mask.data].tolist())

    def wrote(builder: object, ptrs: Any, value: object, mask: Any, *more: object) -> None:
        assert made[-1].has_waited, f"{made[-1].kernel} writes before it waits"
        made[-1].writes.update(np.broadcast_to(ptrs.data, mask.data.shape)[mask.data].tolist())

    patched(interpreter.GridExecutor, "__call__", launched)
    patched(interpreter.InterpreterBuilder, "set_grid_idx", began)
    patched(interpreter.InterpreterBuilder, "create_masked_load", read)
    patched(interpreter.InterpreterBuilder, "create_masked_store", wrote)
    monkeypatch.setattr(launch, "gdc_wait", waited)
    monkeypatch.setattr(launch, "gdc_launch_dependents", lambda **options: None)
    monkeypatch.setattr(matmul, "prefetch_to_l2", lambda start, num_bytes: None)  # fetches, and reads nothing
    monkeypatch.setattr(fused_networks, "is_hopper", lambda device: True)
    return made


def broken(made: list[Launch]) -> list[str]:
    """Pairs of launches of which the second may read what the first has not written yet."""
    return [
        f"{after.kernel} reads early what {before.kernel} writes"
        for before, after in pairwise(made)
        if after.early_reads & before.writes
    ]


@pytest.mark.slow
def test_no_kernel_of_a_frame_reads_early_what_the_one_before_writes(talker: Talker, launches: list[Launch]) -> None:
    made_by = runner(talker, "fused")
    launches.clear()
    frames(made_by, talker, count=2)
    assert broken(launches) == []
    early = [each for each in launches if each.is_early]
    assert all(each.has_waited for each in early)
    assert any(each.early_reads for each in early), "residuals are read early"


@pytest.mark.parametrize("num_between", [0, 1])
def test_an_order_that_is_broken_is_found(launches: list[Launch], device: torch.device, *, num_between: int) -> None:
    """A product whose residual the kernel launched just before it wrote."""
    like = torch.randn(64, device=device)
    x, weight = torch.randn(2, 64), torch.randn(64, 64)
    residual, out, other = (like_rows(2, 64, like) for _ in range(3))
    product = Product(pdl=True)
    matmul.matmul(x, weight, residual, product, tile=DOT)
    for _ in range(num_between):
        matmul.matmul(x, weight, other, product, tile=DOT)
    matmul.matmul(x, weight, out, product, residual=residual.values, tile=DOT)
    assert len(broken(launches)) == 1 - num_between
