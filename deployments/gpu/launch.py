"""Programmatic dependent launch: a kernel starts while its predecessor still runs, and fetches its weights meanwhile.

A kernel lets its successor start once its own predecessor has finished. When a kernel starts, all kernels before its
predecessor have therefore finished: their results may be read before `wait_for_predecessor`, past the first-level
cache, which may be stale (`cache_modifier=".cg"`). Results of the predecessor may be read only after it.
tests/deployments/talker/kernels/test_launch_order.py checks the talker's launches by the addresses that they touch.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launches_early(device: torch.device) -> bool:
    """Whether the GPU supports it: Hopper (9.0) and newer. Elsewhere its instructions do not compile."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def shared_bytes(device: torch.device) -> int:
    """How much shared memory a program may have, from 99 KiB (L4, RTX) to 227 (Hopper); 0 for the interpreter."""
    if device.type == "cpu":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@triton.jit
def wait_for_predecessor(pdl: tl.constexpr):
    """Wait until the previous kernel has finished and its writes are visible, then let the next one start."""
    if pdl:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_to_l2(start, num_bytes: tl.constexpr):
    """Ask for whole cache lines from pointer `start` on without waiting; a remainder under 128 lines is left out."""
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
