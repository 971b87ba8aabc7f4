"""Programmatic dependent launch: a kernel starts while its predecessor still runs, and fetches its weights meanwhile.

Whatever an earlier kernel of the chain wrote may be read only behind `wait_for_predecessor`. What is read before it
must have been written before the chain began: weights, seeds and frame numbers.
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
