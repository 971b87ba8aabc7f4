"""The runner's way on a GPU, run on a CPU: buckets, packed prompts, one shape for all contexts."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.config import TalkerConfig
from deployments.protocol import SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from deployments.talker.networks.frame_networks import NetworkKind
from deployments.talker.runner.model_runner import ModelRunner, RunnerShape, build_runner
from deployments.talker.runner.prefill import pack
from deployments.talker.state.kv_cache import KVCache
from tests.deployments.talker.driving import GREEDY, ask, resumed, speak, speak_all

CONFIG = TalkerConfig(device="cpu", max_num_seqs=5, max_model_len=1024)
LONG_TEXT = "A text whose prompt does not fit into one pass. " * 14
REQUESTS = [
    ask("Hello there.", sampling=GREEDY, frames=12),
    ask("Streaming.", frames=14, seed=3, non_streaming_mode=False),
    ask(LONG_TEXT, sampling=GREEDY, frames=5),
    ask("Instructed.", frames=9, seed=8, instructions="Speak slowly."),
    ask("The last one.", frames=40, seed=2, non_streaming_mode=False, ignore_eos=True),
]


def like_a_gpu(directory: Path, *, deterministic: bool = False, networks: NetworkKind = "plain") -> Engine:
    engine = build_engine(directory, CONFIG)
    blocks, old = engine.scheduler.blocks, engine.runner
    cache = KVCache(
        engine.model_config.talker, num_blocks=blocks.num_blocks, block_size=blocks.block_size,
        dtype=torch.float32, device=old.device,
    )  # fmt: skip
    shape = RunnerShape(CONFIG.max_num_seqs, CONFIG.max_model_len, networks, deterministic)
    runner = build_runner(old.networks.tables, cache, blocks, shape)
    return Engine(engine.info, engine.prompts, engine.limits, runner, engine.scheduler, engine.audio)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("steps_between", [0, 2])
def test_it_speaks_as_a_cpu(tiny_checkpoint: Callable[[str], Path], deterministic: bool, steps_between: int) -> None:
    checkpoint = tiny_checkpoint("CustomVoice")
    expected = speak_all(build_engine(checkpoint, CONFIG), REQUESTS)
    engine = like_a_gpu(checkpoint, deterministic=deterministic)
    spoken = speak_all(engine, REQUESTS, steps_between=steps_between)
    assert engine.runner.state.positions[engine.runner.state.scratch_row] == 0, "padding stays within all tables"
    for one, other in zip(spoken, expected, strict=True):
        np.testing.assert_array_equal(one.codes, other.codes)
        assert one.reason is other.reason


@pytest.mark.parametrize(("deterministic", "most_positions"), [(False, 512), (True, 512), (False, 16)])
def test_it_resumes_as_the_cpu_does(
    tiny_checkpoint: Callable[[str], Path], deterministic: bool, most_positions: int
) -> None:
    engine = like_a_gpu(tiny_checkpoint("CustomVoice"), deterministic=deterministic)
    whole = speak(engine, REQUESTS[4])
    runner = engine.runner
    engine.runner = ModelRunner(runner.networks, runner.blocks, runner.shape, most_positions=most_positions)
    parts = speak_all(engine, [resumed(REQUESTS[4], whole.codes[:begun]) for begun in (30, 9)])
    for begun, rest in zip((30, 9), parts, strict=True):
        np.testing.assert_array_equal(rest.codes, whole.codes[begun:])


def test_deterministic_resumption_ends_in_the_very_same_state(tiny_checkpoint: Callable[[str], Path]) -> None:
    def hidden_after(engine: Engine, request: SynthesisRequest, *, steps: int) -> torch.Tensor:
        engine.add(0, request)
        for _ in range(steps):
            engine.step()
        assert engine.scheduler.running[0].num_frames == 30
        engine.runner.run_pending_advance()
        hidden = engine.runner.state.hidden[0].clone()
        engine.abort(0)
        return hidden

    checkpoint = tiny_checkpoint("CustomVoice")
    engine = like_a_gpu(checkpoint, deterministic=True)
    whole = speak(engine, REQUESTS[4])
    made = hidden_after(engine, REQUESTS[4], steps=30)
    again = hidden_after(engine, resumed(REQUESTS[4], whole.codes[:29]), steps=1)
    assert torch.equal(again, made)


def test_an_advance_for_preempted_sequences_is_dropped(checkpoint: Path) -> None:
    engine = build_engine(checkpoint, CONFIG)
    engine.add(0, REQUESTS[0])
    engine.step()
    runner, sequence = engine.runner, engine.scheduler.running[0]
    assert runner.has_pending_advance
    row, sequence.row = sequence.row, None
    runner.run_pending_advance()
    sequence.row = row  # that of other blocks
    assert not runner.has_pending_advance


def test_prompts_are_packed_in_their_order() -> None:
    class Prompted:
        def __init__(self, rows: int) -> None:
            self.rows = rows

    sized = [(Prompted(rows), rows) for rows in [10, 10, 40, 12, 150, 3]]
    passes = list(pack(sized, num_positions=64, together=64))  # type: ignore[arg-type]
    cut = [[(part.sequence.rows, part.start, part.stop) for part in parts] for parts in passes]  # type: ignore[attr-defined]
    assert all(part.is_last == (part.stop == part.sequence.rows) for parts in passes for part in parts)  # type: ignore[attr-defined]
    assert sorted(part for parts in cut for part in parts) == sorted(
        [(10, 0, 10), (10, 0, 10), (40, 0, 40), (12, 0, 12), (3, 0, 3), (150, 0, 64), (150, 64, 128), (150, 128, 150)]
    )
    assert all(sum(stop - start for _, start, stop in parts) <= 64 for parts in cut)
    alone = list(pack(sized, num_positions=64, together=0))  # type: ignore[arg-type]
    assert [len(parts) for parts in alone] == [1] * 8


@pytest.mark.parametrize(("shape", "rows", "positions"), [
    (RunnerShape(3, 64, "cpu"), [1, 2, 3], [64]), (RunnerShape(3, 64, "cpu", deterministic=True), [1, 2, 3], [64]),
    (RunnerShape(3, 64, "exact"), [3], [3]), (RunnerShape(1, 64, "plain"), [1], [16, 32, 64]),
    (RunnerShape(6, 64, "plain"), [1, 2, 6], [16, 32, 64]),
    (RunnerShape(64, 64, "fused"), [1, 2, 8, 16, 32, 48, 64], [16, 32, 64]),
    (RunnerShape(6, 64, "fused", deterministic=True), [6], [16, 32, 64]),
])  # fmt: skip
def test_steps_and_passes_are_as_small_as_possible(shape: RunnerShape, rows: list[int], positions: list[int]) -> None:
    assert shape.sizes(most_positions=64) == (rows, positions)
