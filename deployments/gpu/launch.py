"""Programmatic dependent launch: a kernel starts and prefetches its weights while its predecessor is still running.

A kernel lets its successor start once its own predecessor has finished. At the start of a kernel, all kernels before
its predecessor have therefore finished, and their results are readable before `wait_for_predecessor`. Such reads must
bypass the L1 cache, which may be stale (`cache_modifier=".cg"`). Results of the predecessor are readable only after
`wait_for_predecessor`. tests/deployments/talker/kernels/test_launch_order.py checks the memory accesses of all talker
kernels against these rules.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def is_hopper(device: torch.device) -> bool:
    """Return whether the GPU supports dependent launches and copies tiles by itself (TMA): Hopper or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory per program: 99 KiB (L4, RTX) to 227 KiB (Hopper), 0 for the interpreter."""
    if device.type == "cpu":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def hash_helpers(*helpers: Callable[..., Any]) -> None:
    """Fix the keys that kernels calling `helpers` have in Triton's cache.

    A key depends on whether a kernel's helpers have been hashed before the kernel. Processes that launch kernels in
    another order, such as those of `compile_ahead`, would compile such a kernel again.
    """
    for helper in helpers:
        getattr(helper, "cache_key", None)  # the interpreter's functions have none


@triton.jit
def wait_for_predecessor(pdl: tl.constexpr):
    """Wait until the previous kernel has finished and its writes are visible, then let the next kernel start."""
    if pdl:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_to_l2(start, num_bytes: tl.constexpr):
    """Prefetch full cache lines starting at pointer `start`, without waiting. Skips a remainder of under 128 lines."""
    line = start.to(tl.int64, bitcast=True) + tl.arange(0, 128) * 128
    for step in tl.static_range(num_bytes // (128 * 128)):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [line + step * (128 * 128)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
