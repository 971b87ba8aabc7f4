"""Times whole talker steps and predictor frames inside CUDA graphs, beside the bytes' floor.

    python -m tools.kernels.bench [--model 1.7B-CustomVoice] [--json FILE]

Weights are random: they cost what real ones cost.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from deployments.talker.kernels.paged_attention import choose_attention
from deployments.talker.model.model_config import TransformerConfig
from deployments.talker.model.talker import Talker
from deployments.talker.networks.fused_networks import FusedPredictor, PackedPredictor
from deployments.talker.networks.fused_stack import FusedStack, PackedStack
from deployments.talker.sampling.torch_sampler import Draw
from deployments.talker.state.batch_state import BatchOptions, Context, DrawingOptions
from deployments.talker.state.kv_cache import KVCache
from talkray_tools.released import SHAPES
from tools.kernels.sweep import BANDWIDTH, config_of, stack_cases, time_graph

_BLOCK_SIZE = 64


def random_talker(model: str) -> Talker:
    """A talker of the true size with random weights, on the GPU in bfloat16."""
    config = replace(config_of(model), text_vocab_size=1024)  # decoding never looks at the text table
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


class DecodeStep:
    """What a decode step needs, for one number of rows."""

    def __init__(self, talker: Talker, rows: int, *, length: int, block_size: int = _BLOCK_SIZE) -> None:
        config = talker.config
        blocks = -(-length // block_size)
        device = talker.codec_head.weight.device
        self.x = torch.randn((rows, config.talker.hidden_size), device=device).bfloat16()
        self.tables = (torch.randperm(rows * blocks, device=device) + 1).view(rows, blocks).int()
        self.lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
        positions = self.lengths - 1
        slots = self.tables[:, -1].long() * block_size + positions.long() % block_size
        self.context = Context(positions, slots, self.tables, self.lengths)
        num_blocks, dtype = rows * blocks + 1, torch.bfloat16
        self.cache = KVCache(config.talker, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)
        self.cache.blocks.normal_()  # contexts that were never spoken
        self.code0 = torch.randint(config.code_vocab_size, (rows,), device=device)
        self.draw = Draw(torch.arange(rows, device=device), torch.arange(rows, device=device), 0)
        options = DrawingOptions(do_sample=True, temperature=0.9, top_k=50, top_p=1.0)
        self.options = BatchOptions.of([options] * rows, device=device)


def stack_floor(config: TransformerConfig) -> int:
    """Bytes of a stack's bfloat16 matrices."""
    return config.num_layers * sum(case.num_bytes for case in stack_cases("", config))


def time_steps(talker: Talker, all_rows: list[int], *, length: int) -> list[dict[str, object]]:
    """Whole talker steps and predictor frames, with and without dependent launch."""
    config, results = talker.config, []
    kv_bytes = KVCache.bytes_per_position(config.talker, torch.bfloat16) * length
    frame_bytes = config.num_code_groups * stack_floor(config.predictor)
    for rows in all_rows:
        step = DecodeStep(talker, rows, length=length)
        times: dict[str, float] = {}
        for pdl in (True, False):
            stack = FusedStack(
                PackedStack.pack_in_place(talker.model, config.talker, positions=4096), max_rows=rows, pdl=pdl
            )
            predictor = FusedPredictor(PackedPredictor.pack_in_place(talker), max_rows=rows, pdl=pdl)
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
    attend = choose_attention("auto", stack.heads, block_size=_BLOCK_SIZE, dtype=step.x.dtype, pdl=stack.pdl)

    def body() -> None:
        stack.talker_step(step.x, step.context, step.cache, attend)

    return time_graph(body, calls=1)


def _time_predictor(predictor: FusedPredictor, step: DecodeStep) -> float:
    def body() -> None:
        predictor.predict_frame(step.x, step.code0, step.options, step.draw)

    return time_graph(body, calls=1)


@torch.inference_mode()
def main() -> None:
    """Parse options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.7B-CustomVoice", choices=SHAPES)
    parser.add_argument("--length", type=int, default=300, help="context of every row, in positions")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 16, 32, 48, 64], help="batch sizes")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    talker = random_talker(options.model)
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "model": options.model}
    report["steps"] = time_steps(talker, options.rows, length=options.length)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
