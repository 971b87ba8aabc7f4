"""Find the fastest tiles for every matrix product of the decode loop, and compare them with cuBLAS.

    python -m tools.kernels.sweep [--save FILE]

Weights are random, which does not affect timing. Every graph reads more weights than fit in the L2 cache. `--save`
writes the fastest tiles to `tiles.py`. Tiles compile in one process per core.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from deployments.talker.kernels import tiles as tiles_module
from deployments.talker.kernels.matmul import Product, like_rows, matmul, measure_squares
from deployments.talker.kernels.tiles import MAX_VECTOR_ROWS, MEASURED, SHARED_ROWS, Form, ProductShape, Tile
from deployments.talker.model.model_config import ModelConfig, TransformerConfig
from talkray_tools.released import SHAPES
from tools.kernels.reference import reference_matmul

# Padded batch sizes. Other numbers of rows use the tile of the next larger size.
_ROWS = (1, 2, 16, 32, 64, 128, 256, 512)
# A frame's first pass through the predictor has two rows per sequence.
_PREDICTOR_ROWS = (1, 2, 4, 16, 32, 64, 128, 256, 512)
_SHARED_MEMORY = 227_000  # bytes per program
_MAX_REGISTERS = 128  # registers per thread for prefetched weights
# block_n, block_k, warps, stages, chains
_PIPELINES = (
    (16, 256, 4, 4, 4),
    (16, 256, 2, 4, 4),
    (16, 128, 4, 6, 2),
    (32, 128, 4, 6, 2),
    (16, 256, 4, 4, 1),
    (16, 128, 4, 6, 1),
    (32, 128, 4, 6, 1),
    (32, 128, 4, 4, 1),
    (64, 64, 4, 6, 1),
    (64, 128, 4, 3, 2),
    (16, 512, 4, 3, 4),
    (8, 256, 4, 4, 4),
    # For more than SHARED_ROWS rows:
    (32, 64, 8, 6, 1),
    (32, 128, 8, 4, 1),
    (64, 64, 8, 4, 1),
    (64, 64, 8, 6, 1),
    (64, 128, 8, 3, 1),
    (128, 64, 8, 4, 1),
    (128, 64, 8, 3, 1),
    (16, 128, 8, 6, 1),
)
_TILES_OF_A_JOB = 4
_REPLAYS = 12
_L2_TIMES = 3  # weights to read, as a multiple of the L2 size


@dataclass(frozen=True, slots=True)
class Case:
    """One matrix product of the decode loop."""

    name: str
    columns: int
    depth: int
    gated: bool
    residual: bool
    all_rows: tuple[int, ...] = _ROWS

    @property
    def num_bytes(self) -> int:
        """Bytes of the bfloat16 weights."""
        return self.columns * self.depth * (4 if self.gated else 2)

    def registers(self, block_n: int, warps: int) -> int:
        """Return the registers per thread that hold the weights of a program of `block_n` columns."""
        return block_n * self.depth * (2 if self.gated else 1) // (2 * 32 * warps)


def cases_of(config: ModelConfig) -> list[Case]:
    """Return all distinct matrix products of a frame."""
    found: dict[tuple[int, int, bool], Case] = {}
    heads = [
        Case("codec head", config.vocab_size, config.talker.hidden_size, gated=False, residual=False),
        Case("code head", config.code_vocab_size, config.predictor.hidden_size, gated=False, residual=False),
    ]
    predictor = [replace(case, all_rows=_PREDICTOR_ROWS) for case in stack_cases("pred", config.predictor)]
    for case in [*predictor, *stack_cases("talker", config.talker), *heads]:
        found.setdefault((case.columns, case.depth, case.gated), case)
    return list(found.values())


def stack_cases(name: str, config: TransformerConfig) -> Iterator[Case]:
    width, hidden = config.num_heads * config.head_dim, config.hidden_size
    qkv = width + 2 * config.num_kv_heads * config.head_dim
    yield Case(f"{name} qkv", qkv, hidden, gated=False, residual=False)
    yield Case(f"{name} out", hidden, width, gated=False, residual=True)
    yield Case(f"{name} gate/up", config.intermediate_size, hidden, gated=True, residual=False)
    yield Case(f"{name} down", hidden, config.intermediate_size, gated=False, residual=True)


def candidates(case: Case, rows: int) -> Iterator[Tile]:
    """Yield tiles worth trying. All use early launch, which was faster for nearly all products."""
    yield from _vector_tiles(case, rows)
    yield from _split_tiles(case, rows)
    yield from _pipelined_tiles(case, rows)


def _vector_tiles(case: Case, rows: int) -> Iterator[Tile]:
    shapes = ((4, 8), (8, 8), (16, 8), (4, 4), (2, 4)) if rows == 1 else ((4, 8), (8, 8), (4, 4))
    for block_n, warps in shapes:
        if rows <= MAX_VECTOR_ROWS and 8 <= case.registers(block_n, warps) <= 96:
            yield Tile(Form.VECTOR, block_n, 256, warps)


def _split_tiles(case: Case, rows: int) -> Iterator[Tile]:
    if not 1 < rows <= 16:
        return  # with more rows, the sums need the registers of the weights
    for block_n, warps in ((16, 8), (16, 4), (8, 8)):
        depth = case.depth // warps
        block_k = min(depth & -depth, 4096 // max(16, rows))
        if 16 <= case.registers(block_n, warps) <= _MAX_REGISTERS:
            yield Tile(Form.SPLIT, block_n, block_k, warps)


def _pipelined_tiles(case: Case, rows: int) -> Iterator[Tile]:
    if rows < 2:
        return
    for block_n, block_k, warps, stages, chains in _PIPELINES:
        if warps > 4 and rows <= SHARED_ROWS:
            continue
        if block_n < 16 and case.columns > 2048:
            continue  # there are enough programs without splitting
        for block_m in (16, 64, 128) if rows > SHARED_ROWS else (16,):
            covered = block_m if block_m >= SHARED_ROWS else max(16, rows)
            if covered > 128:
                continue
            shared = stages * block_k * 2 * (covered + block_n * (2 if case.gated else 1))
            if shared <= _SHARED_MEMORY and (block_n < 64 or case.gated or rows > SHARED_ROWS):
                yield Tile(Form.PIPELINED, block_n, block_k, warps, stages, chains, block_m)


def time_graph(body: Callable[[], object], *, calls: int) -> float:
    """Return the median time of one of the `calls` calls in `body`, in microseconds, over replays of a graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 1000 * sorted(times)[len(times) // 2] / calls


class Chain:
    """Products of one case with enough different weights to exceed the L2 cache."""

    def __init__(self, case: Case, rows: int, *, device: torch.device) -> None:
        self.case, self.rows = case, rows
        l2 = torch.cuda.get_device_properties(0).L2_cache_size if device.type == "cuda" else 0
        count = max(4, _L2_TIMES * l2 // case.num_bytes)
        shape = (case.columns * (2 if case.gated else 1), case.depth)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.weights = [torch.randn(shape, dtype=dtype, device=device) * case.depth**-0.5 for _ in range(count)]
        self.x = like_rows(rows, case.depth, self.weights[0])
        self.x.values.normal_()
        self.x.squares.zero_()
        measure_squares(self.x)
        self.x.parts = case.depth // 16  # layout of the previous product's output, whose parts this product sums
        self.residual = torch.randn((rows, case.columns), dtype=dtype, device=device)
        self.out = like_rows(rows, case.columns, self.weights[0])
        self.product = Product(eps=None if case.residual else 1e-6, gated=case.gated, pdl=device.type == "cuda")

    def run(self, tile: Tile, *, limit: int | None = None) -> None:
        """Run one product with each of the weights."""
        residual = self.residual if self.case.residual else None
        for weight in self.weights[:limit]:
            leaves = self.case.residual
            matmul(self.x, weight, self.out, self.product, residual=residual, leave_squares=leaves, tile=tile)

    def is_right(self, tile: Tile) -> bool:
        """Return whether a tile computes the correct product. Also caches the compiled tile on disk."""
        self.run(tile, limit=1)
        residual = self.residual.float() if self.case.residual else None
        expected = reference_matmul(self.x.values.float(), self.weights[0].float(), self.product, residual=residual)
        return torch.allclose(self.out.values.float(), expected, atol=0.03, rtol=0.03)

    def time(self, tile: Tile) -> float:
        """Return the microseconds of one product."""
        return time_graph(lambda: self.run(tile), calls=len(self.weights))


@dataclass(frozen=True, slots=True)
class Job:
    """Tiles of one product to compile and check."""

    case: Case
    rows: int
    tiles: list[Tile]


def fitting(job: Job) -> list[Tile]:
    """Return the tiles that fit the device and compute the correct product."""
    torch.manual_seed(0)
    chain = Chain(job.case, job.rows, device=torch.device("cuda"))
    fits = []
    for tile in job.tiles:
        try:
            is_right = chain.is_right(tile)
        except Exception as error:  # any error disqualifies the configuration
            print(f"  {job.case.name} rows {job.rows} {tile}: {type(error).__name__} {str(error)[:90]}", flush=True)
            continue
        if is_right:
            fits.append(tile)
        else:
            print(f"  {job.case.name} rows {job.rows} {tile}: wrong", flush=True)
    return fits


def jobs_of(cases: list[Case], only: Sequence[int] = ()) -> list[Job]:
    """Return all candidates in small jobs, most promising first. `only` restricts the numbers of rows."""
    found: list[tuple[int, Job]] = []
    for case in cases:
        for rows in (rows for rows in case.all_rows if not only or rows in only):
            tiles = list(candidates(case, rows))
            starts = range(0, len(tiles), _TILES_OF_A_JOB)
            found += [(start, Job(case, rows, tiles[start : start + _TILES_OF_A_JOB])) for start in starts]
    return [job for _, job in sorted(found, key=lambda each: each[0])]


def sweep(cases: list[Case], *, compile_s: float, only: Sequence[int] = ()) -> None:
    """Time every candidate that compiles within `compile_s` seconds, and store the fastest in `MEASURED`.

    `only` restricts the numbers of rows; other entries stay unchanged.
    """
    jobs = jobs_of(cases, only)
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    fits: dict[tuple[Case, int], list[Tile]] = {}
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(fitting, job): job for job in jobs}
        done, late = wait(futures, timeout=compile_s)
        print(f"{len(done)} of {len(jobs)} jobs compiled", flush=True)
        pool.shutdown(wait=True, cancel_futures=True)
    for future in (*done, *(future for future in late if not future.cancelled())):
        job = futures[future]
        fits.setdefault((job.case, job.rows), []).extend(future.result())
    if not only:
        MEASURED.clear()
    for (case, rows), tiles in sorted(fits.items(), key=lambda each: (each[0][0].name, each[0][1])):
        if tiles:
            measure_case(case, rows, tiles)


def measure_case(case: Case, rows: int, tiles: list[Tile]) -> None:
    """Store the fastest of these tiles in `MEASURED`."""
    chain = Chain(case, rows, device=torch.device("cuda"))
    time, tile = min(((chain.time(tile), tile) for tile in tiles), key=lambda timed: timed[0])
    MEASURED.setdefault(ProductShape(case.columns, case.depth, case.gated), {})[rows] = tile
    print(
        f"{case.name:14s} {case.columns:5d}x{case.depth:<5d} rows {rows:3d}: {time:6.2f} us {_source(tile)}", flush=True
    )


def save_measured(file: Path) -> None:
    """Write the module of `MEASURED` with the current table."""
    lines = [Path(tiles_module.__file__).read_text(encoding="utf-8").partition("MEASURED: ")[0]]
    lines[0] += "MEASURED: dict[ProductShape, dict[int, Tile]] = {"
    for shape, by_rows in MEASURED.items():
        lines.append(f"    {shape}: {{")
        lines += [f"        {rows}: {_source(tile)}," for rows, tile in sorted(by_rows.items())]
        lines.append("    },")
    file.write_text("\n".join([*lines, "}"]) + "\n", encoding="utf-8")


def _source(tile: Tile) -> str:
    """Return the Python expression of a tile, without default values."""
    options = (field for field in fields(tile) if field.name != "form" and getattr(tile, field.name) != field.default)
    return f"Tile({tile.form.name}, {', '.join(f'{option.name}={getattr(tile, option.name)}' for option in options)})"


@torch.inference_mode()
def main() -> None:
    """Parse the options, search, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.7B-CustomVoice", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[], help="only these numbers of rows; default: all")
    parser.add_argument("--compile-s", type=float, default=300, help="seconds after which no more tiles are compiled")
    parser.add_argument("--save", type=Path, help="write the table of the tiles found to this file: tiles.py")
    options = parser.parse_args()
    sweep(cases_of(config_of(options.model)), compile_s=options.compile_s, only=options.rows)
    if options.save:
        save_measured(options.save)


def config_of(model: str) -> ModelConfig:
    """Return the configuration of a released checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model].config), encoding="utf-8")
        return ModelConfig.load(Path(folder))


if __name__ == "__main__":
    main()
