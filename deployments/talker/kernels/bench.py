"""Times the decode kernels inside CUDA graphs, beside the bytes' floor and cuBLAS.

    python -m deployments.talker.kernels.bench [--model 1.7B-CustomVoice] [--sweep] [--save FILE] [--json FILE]

Weights are random: they cost what real ones cost. Every graph walks through more weights than the L2 cache holds.
`--sweep` tries tile configurations; `--save` writes the best to `measured_tiles.py`.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from deployments.released import SHAPES
from deployments.talker.kernels import measured_tiles
from deployments.talker.kernels.attention import Context
from deployments.talker.kernels.backends import choose_backend
from deployments.talker.kernels.matmul import (
    MAX_VECTOR_ROWS,
    Form,
    Product,
    Tile,
    like_rows,
    matmul,
    measure_squares,
)
from deployments.talker.kernels.measured_tiles import MEASURED
from deployments.talker.kernels.predictor import FusedPredictor
from deployments.talker.kernels.stack import FusedStack
from deployments.talker.kv_cache import KVCache
from deployments.talker.model.config import ModelConfig, TransformerConfig
from deployments.talker.model.talker import Talker
from deployments.talker.sampling import BatchFilter, Draw, FilterOptions

BANDWIDTH = 4.3e12  # bytes per second of a device-to-device copy on one H200, measured
_BLOCK_SIZE = 256
_SHARED_MEMORY = 227_000  # bytes a program may have
_REPLAYS = 12
_TABLE_TYPE = "dict[tuple[int, int, bool], dict[int, tuple[str, int, int, int, int, bool]]]"
_L2_TIMES = 3  # weights walked through, in L2 sizes


@dataclass(frozen=True, slots=True)
class Case:
    """One matrix product of the decode loop."""

    name: str
    columns: int
    depth: int
    gated: bool
    residual: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the bfloat16 weights."""
        return self.columns * self.depth * (4 if self.gated else 2)

    def registers(self, block_n: int, warps: int) -> int:
        """Registers of a thread that hold the weights of a program of `block_n` columns."""
        return block_n * self.depth * (2 if self.gated else 1) // (2 * 32 * warps)


def cases_of(config: ModelConfig) -> list[Case]:
    """All products of a frame, once each."""
    found: dict[tuple[int, int, bool], Case] = {}
    heads = [
        Case("codec head", config.vocab_size, config.talker.hidden_size, gated=False, residual=False),
        Case("code head", config.code_vocab_size, config.predictor.hidden_size, gated=False, residual=False),
        Case("mtp", config.predictor.hidden_size, config.talker.hidden_size, gated=False, residual=True),
    ]
    for case in [*_stack_cases("talker", config.talker), *_stack_cases("pred", config.predictor), *heads]:
        found.setdefault((case.columns, case.depth, case.gated), case)
    return list(found.values())


def _stack_cases(name: str, config: TransformerConfig) -> Iterator[Case]:
    width, hidden = config.num_heads * config.head_dim, config.hidden_size
    qkv = width + 2 * config.num_kv_heads * config.head_dim
    yield Case(f"{name} qkv", qkv, hidden, gated=False, residual=False)
    yield Case(f"{name} out", hidden, width, gated=False, residual=True)
    yield Case(f"{name} gate/up", config.intermediate_size, hidden, gated=True, residual=False)
    yield Case(f"{name} down", hidden, config.intermediate_size, gated=False, residual=True)


def candidates(case: Case, rows: int) -> Iterator[Tile]:
    """Tiles worth trying, each with and without dependent launch."""
    for tile in (*_vector_tiles(case, rows), *_split_tiles(case, rows), *_pipelined_tiles(case, rows)):
        yield tile
        yield replace(tile, pdl=False)


def _vector_tiles(case: Case, rows: int) -> Iterator[Tile]:
    if rows > MAX_VECTOR_ROWS:
        return
    for block_n, warps in ((4, 8), (8, 8), (16, 8), (4, 4), (2, 4)):
        if 8 <= case.registers(block_n, warps) <= 96:
            yield Tile(Form.VECTOR, block_n, 256, warps)


def _split_tiles(case: Case, rows: int) -> Iterator[Tile]:
    block_m = max(16, rows)
    if not 2 < rows <= 32:
        return
    for block_n, warps in ((16, 4), (16, 8), (32, 8), (8, 8), (16, 16)):
        depth = case.depth // warps
        block_k = min(depth & -depth, 4096 // block_m)
        if case.registers(block_n, warps) <= 96:
            yield Tile(Form.SPLIT, block_n, block_k, warps)


def _pipelined_tiles(case: Case, rows: int) -> Iterator[Tile]:
    if rows <= 2:
        return
    for block_n, block_k, warps, stages in (
        (16, 256, 2, 4), (16, 256, 4, 4), (16, 128, 4, 6), (32, 128, 4, 6), (32, 128, 4, 4), (64, 64, 4, 6)
    ):  # fmt: skip
        shared = stages * block_k * 2 * (max(16, rows) + block_n * (2 if case.gated else 1))
        if shared <= _SHARED_MEMORY and (block_n < 64 or case.gated):
            yield Tile(Form.PIPELINED, block_n, block_k, warps, stages)


def time_graph(body: Callable[[], None], *, calls: int) -> float:
    """Microseconds of one of the `calls` calls that `body` makes, the median of a few replays of a graph."""
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
    """Products of one case over as many different weights as it takes to leave the cache behind."""

    def __init__(self, case: Case, rows: int) -> None:
        self.case, self.rows = case, rows
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        count = max(4, _L2_TIMES * l2 // case.num_bytes)
        columns = case.columns * (2 if case.gated else 1)
        shape = (columns, case.depth)
        self.weights = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(count)]
        self.x = like_rows(rows, case.depth, self.weights[0])
        self.x.values.normal_()
        measure_squares(self.x)
        self.residual = torch.randn((rows, case.columns), dtype=torch.bfloat16, device="cuda")
        self.out = like_rows(rows, case.columns, self.weights[0])

    def run(self, tile: Tile, *, limit: int | None = None) -> None:
        """One product with each of the weights."""
        product = Product(eps=None if self.case.residual else 1e-6, gated=self.case.gated, pdl=True)
        for weight in self.weights[:limit]:
            matmul(self.x, weight, self.out, tile, product, residual=self.residual if self.case.residual else None)

    def time(self, tile: Tile) -> float:
        """Microseconds of one product."""
        return time_graph(lambda: self.run(tile), calls=len(self.weights))

    def time_cublas(self) -> float:
        """Microseconds of the bare product by cuBLAS."""

        def body() -> None:
            for weight in self.weights:
                nn.functional.linear(self.x.values, weight)

        return time_graph(body, calls=len(self.weights))


def _compile(job: tuple[Case, int, list[Tile]]) -> list[Tile]:
    """Run each tile once, which leaves it in the cache on disk; returns those that fit the GPU."""
    case, rows, wanted = job
    torch.manual_seed(0)
    chain = Chain(case, rows)
    fitting = []
    for tile in wanted:
        try:
            chain.run(tile, limit=1)
            torch.cuda.synchronize()
        except Exception as error:  # whatever a configuration fails with, it is out
            print(f"  {case.name} rows {rows} {tile}: {type(error).__name__} {str(error)[:90]}")
        else:
            fitting.append(tile)
    return fitting


def sweep(cases: list[Case], all_rows: list[int]) -> list[dict[str, object]]:
    """Time every candidate; the fastest replace what `MEASURED` holds for these numbers of rows."""
    jobs = [(case, rows, list(candidates(case, rows))) for case in cases for rows in all_rows]
    workers = min(len(jobs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        fitting = list(pool.map(_compile, jobs))
    return [_time_case(case, rows, fits) for (case, rows, _), fits in zip(jobs, fitting, strict=True) if fits]


def _time_case(case: Case, rows: int, tiles: list[Tile]) -> dict[str, object]:
    chain = Chain(case, rows)
    timed = sorted(((chain.time(tile), tile) for tile in tiles), key=lambda entry: entry[0])
    cublas, floor = chain.time_cublas(), 1e6 * case.num_bytes / BANDWIDTH
    best, tile = timed[0]
    bests: dict[str, float] = {}
    for time, each in timed:
        bests.setdefault(f"{each.form} {'early' if each.pdl else 'plain'}", time)
    MEASURED.setdefault((case.columns, case.depth, case.gated), {})[rows] = (
        str(tile.form), tile.block_n, tile.block_k, tile.warps, tile.stages, tile.pdl
    )  # fmt: skip
    print(
        f"{case.name:14s} {case.columns:5d}x{case.depth:<5d} rows {rows:2d}: {best:6.2f} us {_short(tile):34s}"
        f" floor {floor:5.2f} cuBLAS {cublas:5.2f} |",
        ", ".join(f"{name} {time:.2f}" for name, time in bests.items()),
        flush=True,
    )
    all_timed = [(time, asdict(each)) for time, each in timed]
    return {"case": asdict(case), "rows": rows, "cublas_us": cublas, "floor_us": floor, "timed": all_timed}


def _short(tile: Tile) -> str:
    launch = "early" if tile.pdl else "plain"
    return f"{tile.form} n{tile.block_n} k{tile.block_k} w{tile.warps} s{tile.stages} {launch}"


def save_measured(file: Path) -> None:
    """Write `MEASURED` as the module it came from."""
    lines = [f'"""{measured_tiles.__doc__}"""', "", "MEASURED: " + _TABLE_TYPE + " = {"]
    for shape, by_rows in MEASURED.items():
        lines.append(f"    {shape}: {{")
        for rows, (form, *numbers) in sorted(by_rows.items()):
            lines.append(f'        {rows}: ("{form}", {", ".join(map(str, numbers))}),')
        lines.append("    },")
    file.write_text("\n".join([*lines, "}"]) + "\n", encoding="utf-8")


def random_talker(model: str) -> Talker:
    """A talker of the true size with random weights, on the GPU in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model].config_json()), encoding="utf-8")
        config = ModelConfig.load(Path(folder))
    config = replace(config, text_vocab_size=1024)  # decoding never looks at the text table
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        talker = Talker(config)
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in talker.named_parameters():
        parameter.requires_grad_(False)
        if "norm" in name:
            parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator, device="cuda"))
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    talker.prepare(max_positions=4096)
    return talker


class RandomCaches:
    """Keys and values of contexts that nobody spoke."""

    def __init__(self, config: TransformerConfig, num_slots: int, device: torch.device) -> None:
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        self.values = torch.empty_like(self.keys).normal_()


class DecodeStep:
    """What a decode step needs, for one number of rows."""

    def __init__(self, talker: Talker, rows: int, *, length: int) -> None:
        config = talker.config
        blocks = -(-length // _BLOCK_SIZE)
        device = talker.codec_head.weight.device
        self.x = torch.randn((rows, config.talker.hidden_size), device=device).bfloat16()
        self.tables = (torch.randperm(rows * blocks, device=device) + 1).view(rows, blocks).int()
        self.lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
        positions = self.lengths - 1
        slots = self.tables[:, -1].long() * _BLOCK_SIZE + positions.long() % _BLOCK_SIZE
        self.context = Context(positions, slots, self.tables, self.lengths)
        self.cache = RandomCaches(config.talker, (rows * blocks + 1) * _BLOCK_SIZE, device)
        self.code0 = torch.randint(config.code_vocab_size, (rows,), device=device)
        self.draw = Draw(torch.arange(rows, device=device), torch.arange(rows, device=device), 0)
        options = FilterOptions(do_sample=True, temperature=0.9, top_k=50, top_p=1.0)
        self.options = BatchFilter.of([options] * rows, device=device)


def stack_floor(config: TransformerConfig) -> int:
    """Bytes of a stack's bfloat16 matrices."""
    return config.num_layers * sum(case.num_bytes for case in _stack_cases("", config))


def time_steps(talker: Talker, all_rows: list[int], *, length: int) -> list[dict[str, object]]:
    """Whole talker steps and predictor frames, with and without dependent launch."""
    config, results = talker.config, []
    kv_bytes = KVCache.bytes_per_position(config.talker, torch.bfloat16) * length
    frame_bytes = config.num_code_groups * stack_floor(config.predictor)
    for rows in all_rows:
        step = DecodeStep(talker, rows, length=length)
        times: dict[str, float] = {}
        for pdl in (True, False):
            stack = FusedStack(talker.model, config.talker, max_rows=rows, positions=4096, pdl=pdl)
            predictor = FusedPredictor(talker, max_rows=rows, pdl=pdl)
            label = "pdl" if pdl else "plain"
            times[f"talker {label}"] = _time_talker(stack, step)
            times[f"predictor {label}"] = _time_predictor(predictor, step)
            del stack, predictor
        floors = (stack_floor(config.talker) + rows * kv_bytes) / BANDWIDTH, frame_bytes / BANDWIDTH
        print(
            f"rows {rows:2d}, context {length}: "
            + ", ".join(f"{name} {time / 1000:.3f}" for name, time in times.items())
            + f" ms; floor talker {1000 * floors[0]:.2f} predictor {1000 * floors[1]:.2f};"
            f" frame {(times['talker pdl'] + times['predictor pdl']) / 1000:.2f} ms",
            flush=True,
        )
        results.append({"rows": rows, "length": length, "us": times, "floor_us": [1e6 * floor for floor in floors]})
    return results


def _time_talker(stack: FusedStack, step: DecodeStep) -> float:
    attend = choose_backend("auto", stack.heads, block_size=_BLOCK_SIZE, dtype=step.x.dtype, pdl=stack.pdl)

    def body() -> None:
        stack.talker_step(step.x, step.context, step.cache, attend)

    return time_graph(body, calls=1)


def _time_predictor(predictor: FusedPredictor, step: DecodeStep) -> float:
    def body() -> None:
        predictor.frame(step.x, step.code0, step.options, step.draw)

    return time_graph(body, calls=1)


@torch.inference_mode()
def main() -> None:
    """Parse options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.7B-CustomVoice", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64], help="rows of the sweep")
    parser.add_argument("--length", type=int, default=300, help="context of every row, in positions")
    parser.add_argument("--sweep", action="store_true", help="search tiles first")
    parser.add_argument("--save", type=Path, help="write the table of the tiles found to this file: measured_tiles.py")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 8, 32, 64], help="rows of the whole steps")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    talker = random_talker(options.model)
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "model": options.model}
    if options.sweep:
        report["sweep"] = sweep(cases_of(talker.config), options.rows)
        if options.save:
            save_measured(options.save)
    report["steps"] = time_steps(talker, options.steps, length=options.length)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
