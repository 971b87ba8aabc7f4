"""Whether the talker's kernels compile for GPUs that are not here, and fit their shared memory. Nothing is run."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton: make kernels installs it")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.runtime.errors import PTXASError  # noqa: E402

from deployments.gpu import compile_ahead  # noqa: E402
from deployments.gpu.compile_ahead import Kernel, compile_kernel, noted_launches  # noqa: E402
from deployments.gpu.launch import is_hopper  # noqa: E402
from deployments.talker.kernels import matmul  # noqa: E402
from deployments.talker.kernels.matmul import Product, like_rows  # noqa: E402
from deployments.talker.kernels.tiles import MEASURED, SHARED_ROWS, Form, tile_for  # noqa: E402
from deployments.talker.model.input_tables import InputTables  # noqa: E402
from deployments.talker.model.model_config import ModelConfig  # noqa: E402
from deployments.talker.model.talker import Talker  # noqa: E402
from deployments.talker.networks import fused_networks  # noqa: E402
from deployments.talker.runner.model_runner import RunnerShape, build_runner  # noqa: E402
from deployments.talker.state.batch_state import WIDE  # noqa: E402
from deployments.talker.state.kv_cache import BlockManager, KVCache  # noqa: E402
from talkray_tools.released import SHAPES  # noqa: E402
from tests.deployments.gpu.test_compile_ahead import Driver  # noqa: E402

A100, L4, H100, RTX_5090 = (8, 0), (8, 9), (9, 0), (12, 0)
SHARED_BYTES = {A100: 163 << 10, L4: 99 << 10, H100: 227 << 10, RTX_5090: 99 << 10}


@pytest.fixture(params=[A100, L4, H100, RTX_5090], ids=["A100", "L4", "H100", "RTX 5090"])
def card(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(request.param))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: request.param)
    monkeypatch.setattr(matmul, "shared_bytes", lambda _: SHARED_BYTES[request.param])
    return request.param


def kernels_of_a_frame(folder: Path, monkeypatch: pytest.MonkeyPatch, *, launches_early: bool) -> list[Kernel]:
    """All that one frame of a batch launches, each kind of arguments once, for a talker in bfloat16."""
    monkeypatch.setattr(fused_networks, "is_hopper", lambda _: launches_early)
    (folder / "config.json").write_text(json.dumps(SHAPES["tiny-CustomVoice"].config), encoding="utf-8")
    talker = Talker(replace(ModelConfig.load(folder), num_code_groups=4)).to(torch.bfloat16)
    talker.requires_grad_(requires_grad=False)
    talker.prepare(max_positions=128)
    config, device = talker.config.talker, torch.device("cpu")
    cache = KVCache(config, num_blocks=20, block_size=16, dtype=torch.bfloat16, device=device)
    made_by = build_runner(InputTables(talker), cache, BlockManager(20, 16), RunnerShape(16, 64, "fused"))
    networks = made_by.networks
    with noted_launches() as kernels:
        for batch in (1, 16):
            networks.predict(torch.arange(batch), WIDE)
            networks.advance(torch.arange(batch), length=64)
    return kernels


def test_a_frames_kernels_compile(card: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched early they would not, before Hopper: it has the instructions first."""
    has_it = is_hopper(torch.device("cuda"))
    kernels = kernels_of_a_frame(tmp_path, monkeypatch, launches_early=has_it)
    assert {kernel.function for kernel in kernels} >= {"vector_matmul", "pipelined_matmul", "_paged_attention"}
    for kernel in kernels:
        compile_kernel(kernel)
    assert has_it is (card >= H100)
    if not has_it:
        early = kernels_of_a_frame(tmp_path, monkeypatch, launches_early=True)
        with pytest.raises(PTXASError, match="sm_90"):
            compile_kernel(next(kernel for kernel in early if kernel.function == "vector_matmul"))


def test_pipelines_fit_the_shared_memory(card: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measured tile by arithmetic, and that of the largest stages by the compiler's own count."""
    counted: list[int] = []
    compiled = compile_ahead.compile_source

    def compile_and_count(*arguments: Any, **options: Any) -> None:
        counted.append(compiled(*arguments, **options).metadata.shared)

    monkeypatch.setattr(compile_ahead, "compile_source", compile_and_count)
    sizes = {}
    for (columns, depth, gated), by_rows in MEASURED.items():
        for num_rows in by_rows:
            tile = tile_for(columns, depth, gated=gated, num_rows=num_rows)
            if tile.form is Form.PIPELINED:
                block_m = max(tile.block_m, 0 if tile.block_m >= SHARED_ROWS else triton.next_power_of_2(num_rows))
                row = torch.zeros(1, dtype=torch.bfloat16)
                stages = matmul._stages(tile, block_m, row, gated=gated)
                sizes[columns, depth, gated, num_rows] = (
                    stages * (block_m + (1 + gated) * tile.block_n) * tile.block_k * 2
                )
                assert stages >= 2
    assert max(sizes.values()) <= SHARED_BYTES[card]
    columns, depth, gated, num_rows = max(sizes, key=lambda each: sizes[each])
    like = torch.zeros(1, dtype=torch.bfloat16)
    x, out = like_rows(num_rows, depth, like), like_rows(num_rows, columns, like)
    weight = torch.zeros((1 + gated) * columns, depth, dtype=torch.bfloat16)
    with compile_ahead.noted_launches() as kernels:
        tile = tile_for(columns, depth, gated=gated, num_rows=num_rows)
        matmul.matmul(x, weight, out, Product(eps=1e-6, gated=gated), tile=tile)
    compile_ahead.compile_kernel(kernels[0])
    assert 0 < counted[0] <= SHARED_BYTES[card]
