"""Programmatic dependent launch: a kernel starts while its predecessor still runs, and fetches its weights meanwhile.

Whatever an earlier kernel of the chain wrote may be read only behind `wait_for_predecessor`. What is read before it must
have been written before the chain began: weights, block tables, seeds and frame numbers.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_predecessor(pdl: tl.constexpr):
    """Let the next kernel start, then wait until the previous one has finished and its writes are visible."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch_to_l2(start, num_bytes: tl.constexpr, pieces: tl.constexpr):
    """Ask for `num_bytes` from pointer `start` on (both multiples of 16 after division by `pieces`) without waiting."""
    size: tl.constexpr = num_bytes // pieces
    tl.static_assert(size % 16 == 0)
    address = start.to(tl.int64, bitcast=True) + tl.arange(0, pieces) * size
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, tl.full([pieces], size, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
