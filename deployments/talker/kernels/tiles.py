"""How each product is cut up, found by `python -m deployments.talker.kernels.bench --sweep` on one H200."""

from deployments.talker.kernels.matmul import MAX_VECTOR_ROWS, Tile

# (columns, depth, gated) -> the rows up to which a tile is used, ascending.
TILES: dict[tuple[int, int, bool], list[tuple[int, Tile]]] = {}


def tile_for(columns: int, depth: int, *, gated: bool, rows: int) -> Tile:
    """The measured tile of a shape; for shapes that nobody measured one that fits."""
    for most_rows, tile in TILES.get((columns, depth, gated), ()):
        if rows <= most_rows:
            return tile
    return default_tile(columns, depth, gated=gated, rows=rows)


def default_tile(columns: int, depth: int, *, gated: bool, rows: int) -> Tile:
    """A tile that divides the shape."""
    if rows <= 2:
        return Tile(_divisor(columns, 8 if gated else 4), _divisor(depth, 256), 4, 1, vector=True)
    return Tile(_divisor(columns, 16 if rows <= 32 else 32), _divisor(depth, 128), 4, 4)


def _divisor(size: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides `size`."""
    return min(size & -size, largest)


assert all(tile.vector <= (rows <= MAX_VECTOR_ROWS) for tiles in TILES.values() for rows, tile in tiles)
