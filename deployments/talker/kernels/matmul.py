"""Product of a few rows with a weight matrix, fused with the operations around it. Reads the weights once.

A product can divide by the root mean square of its input. RMSNorm's weight is folded into the matrix. `1 / rms` is a
factor for the entire row, applied after the product. The sums of squares come from the kernel that wrote the row, each
of whose programs stores the sum over its columns.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deployments.gpu.launch import is_hopper, prefetch_to_l2, shared_bytes, wait_for_predecessor
from deployments.talker.kernels.tiles import SHARED_ROWS, Form, Tile, tile_for

_MAX_BLOCK_M = 128
_MAX_PARTS = 1024  # maximum number of partial sums of squares per row


@dataclass(slots=True)
class Activations:
    """Activations [rows, width], with partial sums of their squares [parts, max rows] float32."""

    values: Tensor
    squares: Tensor
    parts: int


# `matmul` launches one of four kernels, which take the same parameters:
#
#   x, weight, bias, residual, out   as in `matmul`; None omits the operation at compile time
#                                    `copied_matmul` gets x and weight as tensor descriptors
#   squares, parts                   partial sums of the squares of x, and their number; None: x is not normalized
#   squares_out                      receives each program's sum over its columns; None without `leave_squares`
#   num_rows, parts_stride           rows of x; stride between partial sums in both buffers of squares
#   n_size, k_size                   columns of the output, and depth
#   eps, gated, pdl                  as in `Product`
#   block_m, block_n, block_k        as in `Tile`, with the final `block_m`; also stages, chains and warps


@triton.jit
def _load_squares(squares, parts_stride, m, parts: tl.constexpr):
    """Load the partial sums of squares [parts, block_m] before the product, to sum them after the product."""
    part = tl.arange(0, triton.next_power_of_2(parts))
    return tl.load(squares + part[:, None] * parts_stride + m[None, :], mask=part[:, None] < parts, other=0.0)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _prefetched_residual(residual, place, inside):
    """Load residual rows early. They were complete before the predecessor started; see launch.py."""
    return tl.load(residual + place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _grid(num_rows, n_size: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr):
    """Return a program's columns and rows, its output mask, and its output offsets."""
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    m = tl.program_id(1) * block_m + tl.arange(0, block_m)
    return n, m, m[:, None] < num_rows, m[:, None] * n_size + n[None, :]


@triton.jit
def _finish(
    total, up, partial, bias, added, out, squares_out, n, m, inside, place, parts_stride, eps,
    k_size: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Run all operations that follow the product [block_m, block_n], and store the results' sums of squares."""
    if partial is not None:
        scale = tl.rsqrt(tl.sum(partial, axis=0) / k_size + eps)[:, None]
        total *= scale
        up *= scale
    if gated:
        total = _silu(total) * up
    if bias is not None:
        total += tl.load(bias + n)[None, :].to(tl.float32)
    if added is not None:
        total += added
    stored = total.to(out.dtype.element_ty)
    tl.store(out + place, stored, mask=inside)
    if squares_out is not None:
        exact = stored.to(tl.float32)
        tl.store(squares_out + tl.program_id(0) * parts_stride + m, tl.sum(exact * exact, axis=1))


@triton.jit
def _link(x_tile, w_tile, inside, acc, up, up_from: tl.constexpr, gated: tl.constexpr):
    """Add one part of the depth to a chain of sums and, if gated, to the sums for the second half."""
    values = tl.load(x_tile, mask=inside, other=0.0)
    acc = tl.dot(values, tl.load(w_tile), acc, input_precision="ieee")
    if gated:
        up = tl.dot(values, tl.load(w_tile + up_from), up, input_precision="ieee")
    return acc, up


@triton.jit
def pipelined_matmul(
    x, weight, bias, squares, residual, out, squares_out, num_rows, parts_stride, eps, warps: tl.constexpr,
    n_size: tl.constexpr, k_size: tl.constexpr, parts: tl.constexpr, gated: tl.constexpr, pdl: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, chains: tl.constexpr,
):  # fmt: skip
    """Compute `Form.PIPELINED`. Each sum waits tens of cycles for the previous one, so 1, 2 or 4 chains alternate."""
    n, m, inside, place = _grid(num_rows, n_size, block_m, block_n)
    part_k: tl.constexpr = block_k // chains
    up_from: tl.constexpr = n_size * k_size
    added, partial = None, None
    if residual is not None:
        added = _prefetched_residual(residual, place, inside)
    wait_for_predecessor(pdl)
    if squares is not None:
        partial = _load_squares(squares, parts_stride, m, parts)
    k = tl.arange(0, part_k)
    x_tile = x + m[:, None] * k_size + k[None, :]
    w_tile = weight + n[None, :] * k_size + k[:, None]
    none = tl.zeros([block_m, block_n], tl.float32)
    sum_1, sum_2, sum_3, sum_4 = none, none, none, none
    up_1, up_2, up_3, up_4 = none, none, none, none
    for start in tl.range(0, k_size, block_k, num_stages=stages):
        sum_1, up_1 = _link(x_tile + start, w_tile + start, inside, sum_1, up_1, up_from, gated)
        if chains > 1:
            at = start + part_k
            sum_2, up_2 = _link(x_tile + at, w_tile + at, inside, sum_2, up_2, up_from, gated)
        if chains > 2:
            at = start + 2 * part_k
            sum_3, up_3 = _link(x_tile + at, w_tile + at, inside, sum_3, up_3, up_from, gated)
            at = start + 3 * part_k
            sum_4, up_4 = _link(x_tile + at, w_tile + at, inside, sum_4, up_4, up_from, gated)
    acc, up = sum_1, up_1
    if chains > 1:
        acc, up = acc + sum_2, up + up_2
    if chains > 2:
        acc, up = acc + (sum_3 + sum_4), up + (up_3 + up_4)
    _finish(
        acc, up, partial, bias, added, out, squares_out, n, m, inside, place, parts_stride, eps, k_size, gated
    )  # fmt: skip


@triton.jit
def copied_matmul(
    x, weight, bias, squares, residual, out, squares_out, num_rows, parts_stride, eps, warps: tl.constexpr,
    n_size: tl.constexpr, k_size: tl.constexpr, parts: tl.constexpr, gated: tl.constexpr, pdl: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, chains: tl.constexpr,
):  # fmt: skip
    """Compute `Form.COPIED`."""
    n, m, inside, place = _grid(num_rows, n_size, block_m, block_n)
    first_n, first_m = tl.program_id(0) * block_n, tl.program_id(1) * block_m
    added, partial = None, None
    if residual is not None:
        added = _prefetched_residual(residual, place, inside)
    wait_for_predecessor(pdl)
    if squares is not None:
        partial = _load_squares(squares, parts_stride, m, parts)
    acc = tl.zeros([block_m, block_n], tl.float32)
    up = tl.zeros([block_m, block_n], tl.float32)
    for start in tl.range(0, k_size, block_k, num_stages=stages):
        values = x.load([first_m, start])
        acc = tl.dot(values, weight.load([first_n, start]).T, acc, input_precision="ieee")
        if gated:
            up = tl.dot(values, weight.load([n_size + first_n, start]).T, up, input_precision="ieee")
    _finish(
        acc, up, partial, bias, added, out, squares_out, n, m, inside, place, parts_stride, eps, k_size, gated
    )  # fmt: skip


@triton.jit
def split_matmul(
    x, weight, bias, squares, residual, out, squares_out, num_rows, parts_stride, eps, warps: tl.constexpr,
    n_size: tl.constexpr, k_size: tl.constexpr, parts: tl.constexpr, gated: tl.constexpr, pdl: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, chains: tl.constexpr,
):  # fmt: skip
    """Compute `Form.SPLIT` as a batched product, with one part of the depth for each of the `warps`."""
    n, m, inside, place = _grid(num_rows, n_size, block_m, block_n)
    k = tl.arange(0, block_k)
    depth: tl.constexpr = k_size // warps
    first = (tl.arange(0, warps) * depth)[:, None, None]
    chunks: tl.constexpr = depth // block_k
    matrices: tl.constexpr = 2 if gated else 1
    w_tile = weight + first + n[None, :, None] * k_size + k[None, None, :]
    if pdl and chunks > 1:  # otherwise each load would wait for the previous one
        slab: tl.constexpr = block_n * k_size * weight.dtype.element_ty.primitive_bitwidth // 8
        start = weight + tl.program_id(0).to(tl.int64) * block_n * k_size
        prefetch_to_l2(start, slab)
        if gated:
            prefetch_to_l2(start + n_size * k_size, slab)
    weights = ()
    for chunk in tl.static_range(chunks):
        weights = weights + (tl.load(w_tile + chunk * block_k),)
        if gated:
            weights = weights + (tl.load(w_tile + (chunk * block_k + n_size * k_size)),)
    added, partial = None, None
    if residual is not None:
        added = _prefetched_residual(residual, place, inside)
    wait_for_predecessor(pdl)
    if squares is not None:
        partial = _load_squares(squares, parts_stride, m, parts)
    x_tile = x + first + m[None, :, None] * k_size + k[None, None, :]
    acc = tl.zeros([warps, block_m, block_n], tl.float32)
    up = tl.zeros([warps, block_m, block_n], tl.float32)
    for chunk in tl.static_range(chunks):
        values = tl.load(x_tile + chunk * block_k, mask=inside[None], other=0.0)
        acc = tl.dot(values, tl.permute(weights[chunk * matrices], (0, 2, 1)), acc, input_precision="ieee")
        if gated:
            up = tl.dot(values, tl.permute(weights[chunk * matrices + 1], (0, 2, 1)), up, input_precision="ieee")
    _finish(
        tl.sum(acc, axis=0), tl.sum(up, axis=0), partial, bias, added, out, squares_out, n, m, inside, place,
        parts_stride, eps, k_size, gated,
    )  # fmt: skip


@triton.jit
def _weighted(inputs, weights, chunks: tl.constexpr, first: tl.constexpr, stride: tl.constexpr):
    """Return one row's products with the chunks `first`, `first + stride`, ... of `weights`, [block_n] float32."""
    acc = inputs[0].to(tl.float32) * weights[first].to(tl.float32)
    for chunk in tl.static_range(1, chunks):
        acc += inputs[chunk].to(tl.float32) * weights[first + chunk * stride].to(tl.float32)
    return tl.sum(acc, axis=1)


@triton.jit
def vector_matmul(
    x, weight, bias, squares, residual, out, squares_out, num_rows, parts_stride, eps, warps: tl.constexpr,
    n_size: tl.constexpr, k_size: tl.constexpr, parts: tl.constexpr, gated: tl.constexpr, pdl: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, chains: tl.constexpr,
):  # fmt: skip
    """Compute `Form.VECTOR`. `block_m` is the number of rows."""
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    chunks: tl.constexpr = k_size // block_k
    matrices: tl.constexpr = 2 if gated else 1
    w_tile = weight + n[:, None] * k_size + k[None, :]
    weights = ()
    for chunk in tl.static_range(chunks):
        weights = weights + (tl.load(w_tile + chunk * block_k),)
        if gated:
            weights = weights + (tl.load(w_tile + (chunk * block_k + n_size * k_size)),)
    added = ()
    if residual is not None:
        for row in tl.static_range(block_m):
            added = added + (_prefetched_residual(residual, row * n_size + n, n < n_size),)
    wait_for_predecessor(pdl)
    part = tl.arange(0, triton.next_power_of_2(parts))
    for row in tl.static_range(block_m):
        if squares is not None:
            partial = tl.load(squares + part * parts_stride + row, mask=part < parts, other=0.0)
        # The row is repeated for each column, because loading it in the weights' layout avoids an exchange.
        repeated = x + row * k_size + n[:, None] * 0 + k[None, :]
        inputs = ()
        for chunk in tl.static_range(chunks):
            inputs = inputs + (tl.load(repeated + chunk * block_k),)
        total = _weighted(inputs, weights, chunks, 0, matrices)
        if gated:
            up = _weighted(inputs, weights, chunks, 1, matrices)
        if squares is not None:
            scale = tl.rsqrt(tl.sum(partial) / k_size + eps)
            total *= scale
            if gated:
                up *= scale
        if gated:
            total = _silu(total) * up
        if bias is not None:
            total += tl.load(bias + n).to(tl.float32)
        if residual is not None:
            total += added[row]
        stored = total.to(out.dtype.element_ty)
        tl.store(out + row * n_size + n, stored)
        if squares_out is not None:
            exact = stored.to(tl.float32)
            tl.store(squares_out + tl.program_id(0) * parts_stride + row, tl.sum(exact * exact))


_KERNELS = {
    Form.VECTOR: vector_matmul,
    Form.SPLIT: split_matmul,
    Form.PIPELINED: pipelined_matmul,
    Form.COPIED: copied_matmul,
}


@triton.jit
def _row_squares(x, squares, width: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr):
    wait_for_predecessor(pdl)
    column = tl.arange(0, block)
    values = tl.load(x + tl.program_id(0) * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(squares + tl.program_id(0), tl.sum(values * values))


@triton.jit
def _normalise(x, squares, weight, out, parts_stride, eps, parts: tl.constexpr, width: tl.constexpr,
               block: tl.constexpr, pdl: tl.constexpr):  # fmt: skip
    wait_for_predecessor(pdl)
    row, column = tl.program_id(0), tl.arange(0, block)
    part = tl.arange(0, triton.next_power_of_2(parts))
    total = tl.sum(tl.load(squares + part * parts_stride + row, mask=part < parts, other=0.0))
    values = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    scaled = values * tl.rsqrt(total / width + eps) * tl.load(weight + column, mask=column < width, other=0.0)
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), mask=column < width)


@dataclass(frozen=True, slots=True)
class Product:
    """Operations of a product besides `x @ weight.T`: `/ rms(x)`, then the gate. Bias and residual follow."""

    eps: float | None = None  # if set, the input rows are normalized; the norm weight is folded into the matrix
    gated: bool = False  # weight [2 * n, k]: silu of the first half's product times the second half's product
    pdl: bool = False


def matmul(x: Activations | Tensor, weight: Tensor, out: Activations, product: Product, *,
           bias: Tensor | None = None, residual: Tensor | None = None, leave_squares: bool = False,
           tile: Tile | None = None) -> None:  # fmt: skip
    """Fill `out.values` [rows, n]. If `leave_squares` is set, also fill `out.squares` for a product that normalizes it.

    `weight` is [n, k] as in nn.Linear ([2n, k] if gated), and `x` is [rows, k]. Sums are float32. A product that
    normalizes requires `x` with its squares. With `product.pdl`, the kernel launched directly before this one must not
    be the one that wrote `residual`. `tile` defaults to the choice of `tile_for`.
    """
    values = x if isinstance(x, Tensor) else x.values
    squares, parts, parts_stride = None, 1, out.squares.stride(0)
    if product.eps is not None:
        assert isinstance(x, Activations), "a product that normalizes needs the squares of its rows"
        squares, parts, parts_stride = x.squares, x.parts, x.squares.stride(0)
        assert parts_stride == out.squares.stride(0) or not leave_squares, "both buffers of squares share one stride"
    num_rows, k_size = values.shape
    n_size = weight.shape[0] // (2 if product.gated else 1)
    tile = tile or tile_for(n_size, k_size, gated=product.gated, num_rows=num_rows, copies=is_hopper(values.device))
    block_m = tile.block_m
    if tile.form is Form.VECTOR:
        block_m = num_rows
    elif block_m < SHARED_ROWS:
        block_m = max(block_m, triton.next_power_of_2(num_rows))
    x_tiles, weight_tiles = values, weight
    if tile.form is Form.COPIED:
        x_tiles = TensorDescriptor.from_tensor(values, [block_m, tile.block_k])
        weight_tiles = TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k])
    # Triton's launch reads `num_warps` and `launch_pdl`. The kernel reads `warps` and `pdl`.
    _KERNELS[tile.form][(n_size // tile.block_n, triton.cdiv(num_rows, block_m))](
        x_tiles, weight_tiles, bias, squares, residual, out.values,
        out.squares if leave_squares else None, num_rows, parts_stride, product.eps or 0.0,
        n_size=n_size, k_size=k_size, parts=parts, gated=product.gated, pdl=product.pdl,
        block_m=block_m, block_n=tile.block_n, block_k=tile.block_k,
        stages=_stages(tile, block_m, values, gated=product.gated), chains=tile.chains, warps=tile.warps,
        num_warps=tile.warps, launch_pdl=product.pdl,
    )  # fmt: skip
    if leave_squares:
        out.parts = n_size // tile.block_n


def _stages(tile: Tile, block_m: int, x: Tensor, *, gated: bool) -> int:
    """Return the pipeline's depth, which does not affect sums. A stage holds parts of the rows and of each matrix."""
    stage_bytes = (block_m + (2 if gated else 1) * tile.block_n) * tile.block_k * x.element_size()
    room = shared_bytes(x.device)
    return min(tile.stages, room // stage_bytes) if room and tile.form in {Form.PIPELINED, Form.COPIED} else tile.stages


def measure_squares(x: Activations, *, pdl: bool = False) -> None:
    """Fill `x.squares` for rows that a product did not write."""
    num_rows, width = x.values.shape
    _row_squares[(num_rows,)](
        x.values, x.squares, width=width, block=triton.next_power_of_2(width), pdl=pdl, launch_pdl=pdl
    )
    x.parts = 1


def normalise(x: Activations, weight: Tensor, out: Tensor, eps: float, *, pdl: bool = False) -> None:
    """Apply RMSNorm to rows with squares: out [rows, width] = x / rms(x) * weight, computed in float32."""
    num_rows, width = x.values.shape
    _normalise[(num_rows,)](
        x.values, x.squares, weight, out, x.squares.stride(0), eps, parts=x.parts, width=width,
        block=triton.next_power_of_2(width), pdl=pdl, launch_pdl=pdl,
    )  # fmt: skip


def like_rows(num_rows: int, width: int, like: Tensor) -> Activations:
    """Allocate uninitialized rows with the same dtype and device as `like`."""
    squares = torch.empty(
        (_MAX_PARTS, max(_MAX_BLOCK_M, triton.next_power_of_2(num_rows))), dtype=torch.float32, device=like.device
    )
    return Activations(torch.empty((num_rows, width), dtype=like.dtype, device=like.device), squares, 1)
