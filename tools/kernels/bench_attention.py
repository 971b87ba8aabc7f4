"""Times the talker's step with each attention backend that is there, over batch sizes and lengths of context.

    python -m tools.kernels.bench_attention [--rows 1 8 32 64] [--lengths 200 1000 3000]

Whole steps inside CUDA graphs, weights and contexts random. `apart` is how far a backend's attention of one layer lies
from the plain reference in float64, relative to its norm. On an H200 the built-in kernel took 1.18 to 6.35 ms, and
flash-attn 2.8.3 more in each cell, 1.29 to 6.47.
"""

import argparse
import gc
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from deployments.talker.kernels.paged_attention import PagedBackend, choose_attention
from deployments.talker.model.talker import Talker
from deployments.talker.networks.fused_stack import FusedStack, PackedStack
from deployments.talker.state.kv_cache import KVCache
from talkray_tools.released import SHAPES
from tools.kernels.bench import DecodeStep, random_talker
from tools.kernels.reference import reference_attend_paged
from tools.kernels.sweep import time_graph

_BLOCK_SIZE = 256  # the least that flash-attn takes


@dataclass(frozen=True, slots=True)
class Measured:
    """One backend at one shape."""

    backend: str
    rows: int
    length: int
    step_ms: float
    attention_us: float  # of one layer
    apart: float


def measure(talker: Talker, name: str, rows: int, length: int) -> Measured:
    """Time the whole step and one layer's attention, and compare that with the reference."""
    config = talker.config.talker
    torch.manual_seed(0)
    step = DecodeStep(talker, rows, length=length, block_size=_BLOCK_SIZE)
    stack = FusedStack(PackedStack.pack_in_place(talker.model, config, positions=4096), max_rows=rows)
    attend = choose_attention(name, stack.heads, block_size=_BLOCK_SIZE, dtype=step.x.dtype)
    step_us = time_graph(lambda: _step(stack, step, attend), calls=1)
    qkv = torch.randn((rows, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim), device="cuda").bfloat16()
    layers = range(config.num_layers)

    def attention() -> None:
        for layer in layers:
            attend(qkv, stack.layers[layer].norms, _layer(step.cache, layer), step.context)

    attention_us = time_graph(attention, calls=len(layers))
    return Measured(name, rows, length, step_us / 1000, attention_us, _apart(stack, step, attend, qkv))


def _step(stack: FusedStack, step: DecodeStep, attend: PagedBackend) -> None:
    stack.talker_step(step.x, step.context, step.cache, attend)


def _layer(cache: KVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.keys[layer], cache.values[layer]


def _apart(stack: FusedStack, step: DecodeStep, attend: PagedBackend, qkv: torch.Tensor) -> float:
    norms, caches = stack.layers[0].norms, _layer(step.cache, 0)
    exact_caches = caches[0].double(), caches[1].double()
    exact = reference_attend_paged(qkv.double(), norms, stack.heads, exact_caches, step.context, _BLOCK_SIZE)
    return float((attend(qkv, norms, caches, step.context).double() - exact).norm() / exact.norm())


@torch.inference_mode()
def main() -> None:
    """Parse options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.7B-CustomVoice", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 1000, 3000])
    parser.add_argument("--backends", nargs="+", default=["triton", "flash_attn"], choices=["triton", "flash_attn"])
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    talker, results = random_talker(options.model), []
    print("backend     rows  context  step, ms  attention of a layer, us  apart")
    for rows in options.rows:
        for length in options.lengths:
            for name in options.backends:
                got = measure(talker, name, rows, length)
                results.append(asdict(got))
                print(
                    f"{name:10} {rows:5} {length:8} {got.step_ms:9.3f} {got.attention_us:25.2f}  {got.apart:.1e}",
                    flush=True,
                )
                gc.collect()
                torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
