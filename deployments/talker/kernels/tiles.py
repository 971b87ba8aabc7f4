"""Tiles for matrix products: measured tiles, and the choice of a tile for a product."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

# Up to this many rows, multiply-adds are faster than tensor cores, which pad to 16 rows.
MAX_VECTOR_ROWS = 4
# With this many rows or more, a program may cover only part of the rows.
SHARED_ROWS = 64


class Form(StrEnum):
    """How a program multiplies its columns."""

    VECTOR = "vector"  # multiply-adds for at most MAX_VECTOR_ROWS rows; weights are loaded to registers early
    SPLIT = "split"  # tensor cores, with a part of the depth per warp; weights are loaded to registers early
    PIPELINED = "pipelined"  # tensor cores, with weights and rows streamed through shared memory
    COPIED = "copied"  # like PIPELINED, but with the copy engine (TMA) of Hopper GPUs


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is split into programs of `block_n` columns, which process `block_k` of the depth at a time.

    `block_n` must divide the number of columns. `block_k` must divide the depth, or for SPLIT a warp's part of it.
    """

    form: Form
    block_n: int
    block_k: int
    warps: int
    stages: int = 1  # maximum depth of a pipeline; lower if the GPU lacks shared memory
    chains: int = 1  # independent sums in a pipeline, each over part of `block_k`
    block_m: int = 16  # minimum number of rows per program on tensor cores; from SHARED_ROWS on also the maximum


class ProductShape(NamedTuple):
    """Shape of a product, which selects its tile together with the number of rows."""

    columns: int  # columns of the output
    depth: int
    gated: bool  # whether the weight has twice as many columns, see `Product`


def tile_for(columns: int, depth: int, *, gated: bool, num_rows: int, copies: bool = False) -> Tile:
    """Return the tile measured for at least `num_rows` rows, or a default tile that divides the shape.

    `copies` allows tiles of the form COPIED.
    """
    measured = MEASURED.get(shape := ProductShape(columns, depth, gated), {})
    if copies:
        measured = measured | COPIED_TILES.get(shape, {})
    fitting = [most_rows for most_rows in measured if num_rows <= most_rows]
    return measured[min(fitting)] if fitting else _default_tile(shape, num_rows)


def _default_tile(shape: ProductShape, num_rows: int) -> Tile:
    columns, depth, gated = shape
    if num_rows <= MAX_VECTOR_ROWS:
        return Tile(Form.VECTOR, _divisor(columns, 16 if depth <= 1024 and not gated else 4), _divisor(depth, 256), 4)
    if num_rows <= 32:
        return Tile(Form.PIPELINED, _divisor(columns, 16), _divisor(depth, 128), 4, 6)
    stages, block_m = 2 if gated else 3, 16 if num_rows <= SHARED_ROWS else SHARED_ROWS
    return Tile(Form.PIPELINED, _divisor(columns, 32), _divisor(depth, 128), 4, stages, block_m=block_m)


def _divisor(size: int, largest: int) -> int:
    """Return the largest power of two up to `largest` that divides `size`."""
    return min(size & -size, largest)


VECTOR, SPLIT, PIPELINED, COPIED = Form
# Tiles for the copy engine, by number of rows, where it was at least 3 % faster on one NVIDIA H200. Set by hand.
COPIED_TILES: dict[ProductShape, dict[int, Tile]] = {
    ProductShape(columns=4096, depth=2048, gated=False): {
        256: Tile(COPIED, block_n=64, block_k=64, warps=8, stages=6, block_m=128),
        512: Tile(COPIED, block_n=128, block_k=64, warps=8, stages=4, block_m=128),
    },
    ProductShape(columns=2048, depth=2048, gated=False): {
        256: Tile(COPIED, block_n=64, block_k=128, warps=4, stages=4, block_m=64),
        512: Tile(COPIED, block_n=64, block_k=64, warps=4, stages=5, block_m=128),
    },
    ProductShape(columns=6144, depth=2048, gated=True): {
        256: Tile(COPIED, block_n=128, block_k=64, warps=8, stages=4, block_m=128),
        512: Tile(COPIED, block_n=128, block_k=64, warps=8, stages=4, block_m=128),
    },
    ProductShape(columns=2048, depth=6144, gated=False): {
        256: Tile(COPIED, block_n=64, block_k=128, warps=4, stages=4, block_m=64),
        512: Tile(COPIED, block_n=64, block_k=64, warps=8, stages=6, block_m=128),
    },
    ProductShape(columns=4096, depth=1024, gated=False): {
        256: Tile(COPIED, block_n=64, block_k=64, warps=4, stages=5, block_m=128),
        512: Tile(COPIED, block_n=128, block_k=64, warps=8, stages=4, block_m=128),
    },
    ProductShape(columns=1024, depth=2048, gated=False): {
        512: Tile(COPIED, block_n=64, block_k=128, warps=4, stages=4, block_m=64),
    },
    ProductShape(columns=3072, depth=1024, gated=True): {
        256: Tile(COPIED, block_n=64, block_k=64, warps=4, stages=5, block_m=128),
        512: Tile(COPIED, block_n=128, block_k=64, warps=8, stages=4, block_m=128),
    },
    ProductShape(columns=1024, depth=3072, gated=False): {
        512: Tile(COPIED, block_n=64, block_k=128, warps=4, stages=4, block_m=64),
    },
}
# Tiles by number of rows, written by `python -m tools.kernels.sweep --save` on one NVIDIA H200. These were set by hand
# from timings of full steps and prompts: 8, 16, 256 and 512 rows, 32 rows (tiles of 64), and at 128 rows those of
# (4096, 2048) and (3072, 2048). `--save` overwrites them: without `--rows` the sweep clears the table, and with it the
# sweep replaces the named rows. Restore them from git.
MEASURED: dict[ProductShape, dict[int, Tile]] = {
    ProductShape(columns=2048, depth=1024, gated=False): {
        1: Tile(VECTOR, block_n=16, block_k=256, warps=8),
        2: Tile(VECTOR, block_n=8, block_k=256, warps=8),
        16: Tile(PIPELINED, block_n=16, block_k=128, warps=4, stages=6, block_m=64),
        32: Tile(PIPELINED, block_n=16, block_k=128, warps=4, stages=6, block_m=64),
        64: Tile(PIPELINED, block_n=16, block_k=128, warps=4, stages=6),
        128: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6, block_m=64),
        256: Tile(PIPELINED, block_n=32, block_k=64, warps=8, stages=6, block_m=128),
    },
    ProductShape(columns=3072, depth=2048, gated=False): {
        1: Tile(VECTOR, block_n=8, block_k=256, warps=8),
        2: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6),
        16: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6),
        32: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6, block_m=64),
        64: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6),
        128: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6, block_m=64),
        256: Tile(PIPELINED, block_n=64, block_k=64, warps=4, stages=6, block_m=64),
    },
    ProductShape(columns=1024, depth=3072, gated=False): {
        1: Tile(VECTOR, block_n=8, block_k=256, warps=8),
        2: Tile(VECTOR, block_n=8, block_k=256, warps=8),
        4: Tile(VECTOR, block_n=4, block_k=256, warps=4),
        16: Tile(SPLIT, block_n=16, block_k=128, warps=8),
        32: Tile(PIPELINED, block_n=16, block_k=256, warps=4, stages=4, chains=4, block_m=64),
        64: Tile(PIPELINED, block_n=16, block_k=256, warps=4, stages=4, chains=4),
        128: Tile(PIPELINED, block_n=16, block_k=256, warps=4, stages=4, chains=4, block_m=64),
        256: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6, chains=2, block_m=64),
        512: Tile(PIPELINED, block_n=32, block_k=64, warps=8, stages=6, block_m=128),
    },
    ProductShape(columns=3072, depth=1024, gated=True): {
        1: Tile(VECTOR, block_n=16, block_k=256, warps=8),
        2: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6),
        4: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6),
        8: Tile(PIPELINED, block_n=64, block_k=64, warps=4, stages=6),
        16: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6),
        32: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6, block_m=64),
        64: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6),
        128: Tile(PIPELINED, block_n=64, block_k=64, warps=4, stages=6, block_m=64),
        256: Tile(PIPELINED, block_n=128, block_k=64, warps=4, stages=4, block_m=64),
        512: Tile(PIPELINED, block_n=128, block_k=64, warps=8, stages=3, block_m=128),
    },
    ProductShape(columns=1024, depth=2048, gated=False): {
        1: Tile(VECTOR, block_n=8, block_k=256, warps=8),
        2: Tile(VECTOR, block_n=4, block_k=256, warps=8),
        4: Tile(SPLIT, block_n=16, block_k=256, warps=8),
        16: Tile(SPLIT, block_n=16, block_k=256, warps=4),
        32: Tile(PIPELINED, block_n=16, block_k=256, warps=4, stages=4, chains=4, block_m=64),
        64: Tile(PIPELINED, block_n=16, block_k=256, warps=4, stages=4, chains=4),
        128: Tile(PIPELINED, block_n=16, block_k=256, warps=4, stages=4, chains=4, block_m=64),
        256: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6, chains=2, block_m=64),
        512: Tile(PIPELINED, block_n=32, block_k=64, warps=8, stages=6, block_m=128),
    },
    ProductShape(columns=4096, depth=1024, gated=False): {
        1: Tile(VECTOR, block_n=8, block_k=256, warps=8),
        2: Tile(VECTOR, block_n=4, block_k=256, warps=4),
        4: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6),
        16: Tile(SPLIT, block_n=16, block_k=256, warps=4),
        32: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6, block_m=64),
        64: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6),
        128: Tile(PIPELINED, block_n=64, block_k=64, warps=4, stages=6, block_m=64),
        256: Tile(PIPELINED, block_n=64, block_k=64, warps=8, stages=6, block_m=128),
        512: Tile(PIPELINED, block_n=128, block_k=64, warps=8, stages=4, block_m=128),
    },
    ProductShape(columns=2048, depth=6144, gated=False): {
        1: Tile(VECTOR, block_n=2, block_k=256, warps=4),
        2: Tile(VECTOR, block_n=4, block_k=256, warps=4),
        16: Tile(PIPELINED, block_n=16, block_k=256, warps=4, stages=4, chains=4, block_m=64),
        32: Tile(PIPELINED, block_n=16, block_k=256, warps=4, stages=4, chains=4, block_m=64),
        64: Tile(PIPELINED, block_n=16, block_k=256, warps=4, stages=4, chains=4),
        128: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6, chains=2, block_m=64),
        256: Tile(PIPELINED, block_n=32, block_k=64, warps=8, stages=6, block_m=128),
        512: Tile(PIPELINED, block_n=64, block_k=64, warps=8, stages=6, block_m=128),
    },
    ProductShape(columns=6144, depth=2048, gated=True): {
        1: Tile(VECTOR, block_n=2, block_k=256, warps=4),
        2: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=4),
        8: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=4),
        16: Tile(PIPELINED, block_n=64, block_k=64, warps=4, stages=6, block_m=64),
        32: Tile(PIPELINED, block_n=64, block_k=64, warps=4, stages=6, block_m=64),
        64: Tile(PIPELINED, block_n=64, block_k=64, warps=4, stages=6),
        128: Tile(PIPELINED, block_n=64, block_k=64, warps=8, stages=6),
        256: Tile(PIPELINED, block_n=128, block_k=64, warps=8, stages=3, block_m=128),
        512: Tile(PIPELINED, block_n=128, block_k=64, warps=8, stages=4, block_m=128),
    },
    ProductShape(columns=2048, depth=2048, gated=False): {
        1: Tile(VECTOR, block_n=16, block_k=256, warps=8),
        2: Tile(VECTOR, block_n=8, block_k=256, warps=8),
        8: Tile(SPLIT, block_n=16, block_k=256, warps=4),
        16: Tile(SPLIT, block_n=16, block_k=256, warps=8),
        32: Tile(PIPELINED, block_n=16, block_k=256, warps=4, stages=4, chains=4, block_m=64),
        64: Tile(PIPELINED, block_n=16, block_k=256, warps=4, stages=4, chains=4),
        128: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6, chains=2, block_m=64),
        256: Tile(PIPELINED, block_n=32, block_k=64, warps=8, stages=6, block_m=128),
        512: Tile(PIPELINED, block_n=64, block_k=64, warps=8, stages=6, block_m=128),
    },
    ProductShape(columns=4096, depth=2048, gated=False): {
        1: Tile(VECTOR, block_n=4, block_k=256, warps=4),
        2: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6),
        16: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6, block_m=64),
        32: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6, block_m=64),
        64: Tile(PIPELINED, block_n=32, block_k=128, warps=4, stages=6),
        128: Tile(PIPELINED, block_n=32, block_k=64, warps=8, stages=6),
        256: Tile(PIPELINED, block_n=64, block_k=64, warps=8, stages=6, block_m=128),
        512: Tile(PIPELINED, block_n=128, block_k=64, warps=8, stages=4, block_m=128),
    },
}
