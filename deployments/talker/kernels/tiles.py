"""How each product is cut up: the tile that measured best, and for unmeasured shapes one that fits."""

from deployments.talker.kernels.matmul import MAX_VECTOR_ROWS, SHARED_ROWS, Form, Tile
from deployments.talker.kernels.measured_tiles import MEASURED


def tile_for(columns: int, depth: int, *, gated: bool, rows: int) -> Tile:
    """The tile measured for the least number of rows that is not below `rows`, else one that divides the shape."""
    measured = MEASURED.get((columns, depth, gated), {})
    fitting = [most_rows for most_rows in measured if rows <= most_rows]
    if not fitting:
        return default_tile(columns, depth, gated=gated, rows=rows)
    form, block_n, block_k, warps, stages, chains, block_m = measured[min(fitting)]
    return Tile(Form(form), block_n, block_k, warps, stages, chains, block_m)


def default_tile(columns: int, depth: int, *, gated: bool, rows: int) -> Tile:
    if rows <= MAX_VECTOR_ROWS:
        return Tile(Form.VECTOR, _divisor(columns, 16 if depth <= 1024 and not gated else 4), _divisor(depth, 256), 4)
    if rows <= 32:
        return Tile(Form.PIPELINED, _divisor(columns, 16), _divisor(depth, 128), 4, 6)
    stages = 2 if gated else 3
    block_m = 16 if rows <= SHARED_ROWS else SHARED_ROWS
    return Tile(Form.PIPELINED, _divisor(columns, 32), _divisor(depth, 128), 4, stages, block_m=block_m)


def _divisor(size: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides `size`."""
    return min(size & -size, largest)
