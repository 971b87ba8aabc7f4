"""Kernels for CPUs: what torch computes, and each row as if it were alone. They are built with the package."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.config import TalkerConfig
from deployments.embedded_voice import cpu_networks
from deployments.embedded_voice.cpu_networks import CpuStack, RowCache, RowProduct
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from deployments.talker.model.layers import DecoderStack, RotaryTable
from deployments.talker.model.model_config import TransformerConfig
from deployments.talker.networks.plain_networks import GatheredAttention
from deployments.talker.state.batch_state import Context
from deployments.talker.state.kv_cache import KVCache
from tests.deployments.talker.driving import GREEDY, ask, speak_all

pytestmark = pytest.mark.skipif(cpu_networks._built is None, reason="no C compiler built the kernels")

REQUESTS = [
    ask("Hello there.", sampling=GREEDY, frames=30),
    ask("Another one, with a longer text.", frames=25, seed=7, non_streaming_mode=False),
    ask("A text that is a good deal longer than the other ones. " * 12, sampling=GREEDY, frames=20),
]


def load(checkpoint: Path) -> Engine:
    return build_engine(checkpoint, TalkerConfig(device="cpu", max_num_seqs=4, max_model_len=1024))


@pytest.fixture
def padded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Where there is no compiler."""
    monkeypatch.setattr(cpu_networks, "fits", lambda *_: False)
    return load(checkpoint)


@pytest.mark.parametrize("num_outputs", [1, 16, 19, 96, 200])
def test_a_product_is_that_of_torch_and_no_row_depends_on_the_others(num_outputs: int) -> None:
    generator = torch.Generator().manual_seed(num_outputs)
    weight = torch.randn(num_outputs, 48, generator=generator)
    rows = torch.randn(9, 48, generator=generator)
    product = RowProduct(weight)
    torch.testing.assert_close(product(rows), rows @ weight.T, rtol=1e-5, atol=1e-5)
    alone = torch.cat([product(row[None]) for row in rows])
    for num_rows in range(1, 10):
        assert torch.equal(product(rows[:num_rows]), alone[:num_rows])


def test_codes_are_those_of_torch(checkpoint: Path, padded: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    kernels = load(checkpoint)
    assert (padded.runner.networks.name, kernels.runner.networks.name) == ("exact", "cpu")
    for one, other in zip(speak_all(kernels, REQUESTS), speak_all(padded, REQUESTS), strict=True):
        np.testing.assert_array_equal(one.codes, other.codes)


@pytest.mark.parametrize("head", range(6))
def test_a_followed_head_has_the_weights_that_it_has_in_torch(head: int) -> None:
    """Six heads share two of keys."""
    config = TransformerConfig(16, 16, 1, num_heads=6, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4)
    generator, device = torch.Generator().manual_seed(0), torch.device("cpu")
    rows, stack = torch.randn(5, 16, generator=generator), DecoderStack(config).requires_grad_(False)
    for parameter in stack.parameters():
        parameter.normal_(generator=generator)
    rotary = RotaryTable(config, positions=8, like=rows)
    caches = [KVCache(config, num_blocks=1, block_size=8, dtype=rows.dtype, device=device) for _ in range(2)]
    positions, tables = torch.arange(5), torch.zeros(5, 1, dtype=torch.int32)
    context = Context(positions.int(), positions, tables, positions.int() + 1)
    attention = GatheredAttention(caches[0], context, 5, followed=(0, head))
    hidden = stack(rows, rotary(positions), attention)
    where = RowCache(caches[1].keys, caches[1].values, tables, 8)
    ours = CpuStack(stack, config, rotary).run(rows, context.positions, where, followed=(0, head))
    torch.testing.assert_close(ours, (hidden, attention.weights))
