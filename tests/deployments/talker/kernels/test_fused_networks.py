"""The fused step against the plain one, frame by frame, in float32 so that codes have to be equal."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: make kernels installs it")

from deployments.protocol import SAMPLING_DEFAULTS, FinishReason, Sampling, SynthesisRequest
from deployments.talker.engine.lanes import build_lanes
from deployments.talker.model.input_tables import InputTables
from deployments.talker.model.talker import Talker
from deployments.talker.networks.frame_networks import NetworkKind
from deployments.talker.runner.model_runner import ModelRunner, RunnerShape, build_runner
from deployments.talker.state.kv_cache import BlockManager, KVCache
from deployments.talker.state.sequence import FrameLimit, Sequence
from deployments.talker.text.prompt import Prompt
from tests.deployments.talker.driving import GREEDY

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
SAMPLED = Sampling(**SAMPLING_DEFAULTS)
SAMPLINGS = [SAMPLED, replace(SAMPLED, top_p=0.7, subtalker_top_k=0, repetition_penalty=2.0), replace(SAMPLED, **{
    name: getattr(GREEDY, name) for name in ("do_sample", "subtalker_dosample", "repetition_penalty")
})]  # fmt: skip
BLOCK_SIZE, NUM_BLOCKS = 16, 20


def runner(talker: Talker, networks: NetworkKind, *, deterministic: bool = False) -> ModelRunner:
    talker = copy.deepcopy(talker)  # tables and packed layers take weights of theirs away
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    like = talker.codec_head.weight
    cache = KVCache(
        talker.config.talker, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=like.dtype, device=like.device
    )
    return build_runner(InputTables(talker), cache, blocks, RunnerShape(4, 64, networks, deterministic))


def sequences(talker: Talker) -> list[Sequence]:
    draw, config = np.random.default_rng(0), talker.config
    made = []
    for number, sampling in enumerate(SAMPLINGS):
        text, codec = (draw.integers(0, 500, 5 + 4 * number).astype(np.int32) for _ in range(2))
        codec[0] = config.vocab_size  # no codec row
        prompt = Prompt(text, codec, draw.integers(0, 500, 2).astype(np.int32), num_text_tokens=3)
        asked = SynthesisRequest(str(number), "text", seed=(1 << 63) + number, ignore_eos=number == 1)
        limit = FrameLimit(99, FinishReason.LENGTH)
        made.append(Sequence(number, asked, prompt, sampling, limit, row=2 - number, frame_s=0.08))
    return made


def frames(made_by: ModelRunner, talker: Talker, *, count: int) -> list[list[list[int]]]:
    return speak(made_by, prepared(made_by, talker, count=count), count=count)


def prepared(made_by: ModelRunner, talker: Talker, *, count: int) -> list[Sequence]:
    speaking = sequences(talker)
    for sequence in speaking:
        made_by.blocks.allocate(sequence.id, sequence.num_positions + count)
        made_by.networks.tables.project(np.concatenate((sequence.prompt.text_ids, sequence.prompt.trailing)))
    return speaking


def speak(made_by: ModelRunner, speaking: list[Sequence], *, count: int) -> list[list[list[int]]]:
    """Prefill sequences, then make `count` frames of each: the frames, step by step."""
    made_by.prefill(speaking)
    made = []
    for _ in range(count):
        codes = made_by.queue_step(speaking).result()
        made.append(codes.tolist())
        for sequence, frame in zip(speaking, codes, strict=True):
            sequence.frames.append(frame)
    return made


@pytest.mark.slow
def test_readings_are_those_of_the_plain_step(talker: Talker) -> None:
    talker.config = replace(talker.config, text=replace(talker.config.text, alignment_head=(1, 3)))
    readings = []
    for networks in ("fused", "plain"):
        made_by = runner(talker, networks)
        made_by.prefill(speaking := prepared(made_by, talker, count=2))
        step = made_by.queue_step(speaking)
        made_by.queue_step(speaking).result()  # by then the first one is over
        readings.append(step.readings())
    assert np.array(readings[1])[:, 0].min() > 0.01
    np.testing.assert_allclose(*readings, rtol=2e-3, atol=1e-5)


@pytest.mark.slow
def test_frames_are_those_of_the_plain_step(talker: Talker) -> None:
    fused, plain = runner(talker, "fused"), runner(talker, "plain")
    assert frames(fused, talker, count=3) == frames(plain, talker, count=3)
    torch.testing.assert_close(fused.state.hidden[:3], plain.state.hidden[:3], rtol=1e-3, atol=1e-4)
    assert torch.equal(fused.state.packed[:3], plain.state.packed[:3])
    assert torch.equal(fused.state.seen[:3], plain.state.seen[:3])


@pytest.mark.slow
def test_the_lane_and_a_step_do_not_disturb_each_other(talker: Talker) -> None:
    """A newcomer's prompt, first frame and `advance` between the two halves of a step of others: the same bits."""
    quiet, beside = (runner(talker, "fused") for _ in range(2))
    made: list[tuple[list[list[int]], ...]] = []
    for made_by in (quiet, beside):
        lane, _ = build_lanes(made_by)
        *old, new = prepared(made_by, talker, count=1)
        made_by.prefill(old)
        step = made_by.queue_step(old)  # `advance` is still to come
        if made_by is quiet:
            made_by.run_pending_advance()
        lane.prefill([new])
        first = lane.queue_step([new])
        if made_by is beside:
            made_by.run_pending_advance()
        lane.run_pending_advance()
        made.append((step.result().tolist(), first.result().tolist()))
        if lane.on_gpu:
            torch.cuda.synchronize()  # the lane's stream may still write the newcomer's state
    assert made[0] == made[1]
    for tensor in ("hidden", "packed", "seen"):
        one, other = (getattr(each.state, tensor)[:3] for each in (quiet, beside))
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.slow
def test_deterministic_frames_depend_on_nothing_else(talker: Talker) -> None:
    """Alone, together, and preempted after two frames: the same bits."""
    together = runner(talker, "fused", deterministic=True)
    made = frames(together, talker, count=3)
    again = runner(talker, "fused", deterministic=True)
    sequence = prepared(again, talker, count=3)[1]
    expected = [[step[1]] for step in made]
    assert speak(again, [sequence], count=2) == expected[:2]
    again.state.hidden.zero_()
    assert speak(again, [sequence], count=1) == expected[2:]
    assert torch.equal(again.state.hidden[sequence.row], together.state.hidden[sequence.row])
