"""How far bfloat16 on a GPU is from float32, at the true size."""

import copy
import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton: make kernels installs it")

from deployments.protocol import SAMPLING_DEFAULTS, FinishReason, Sampling, SynthesisRequest
from deployments.talker.model.input_tables import InputTables
from deployments.talker.model.talker import Talker
from deployments.talker.networks.frame_networks import NetworkKind
from deployments.talker.runner.model_runner import RunnerShape, build_runner
from deployments.talker.state.kv_cache import BlockManager, KVCache
from deployments.talker.state.sequence import FrameLimit, Sequence
from deployments.talker.text.prompt import Prompt
from tools.kernels.sweep import config_of

pytestmark = pytest.mark.gpu
logger = logging.getLogger(__name__)

SAMPLED = Sampling(**SAMPLING_DEFAULTS)
STREAMS, FRAMES, BLOCK_SIZE = 8, 12, 64
# A rounding to bfloat16 is wrong by 2^-9 at most, by 0.1 % on average; 28 layers of about five each add up, as a random
# walk, to 2 %. Attention over keys and values that are wrong by as much doubles it at worst.
TOLERANCE = 0.05


def random_talker(model: str) -> Talker:
    """A talker of the true size with random weights, on the GPU in bfloat16."""
    config = replace(config_of(model), text_vocab_size=1024)  # decoding never looks at the text table
    with torch.device("cuda"):
        talker = Talker(config).bfloat16()
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in talker.named_parameters():
        parameter.requires_grad_(False)
        if "norm" in name:
            parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator, device="cuda"))
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    talker.prepare(max_positions=4096)
    return talker


def sequences(talker: Talker) -> list[Sequence]:
    """Prompts of 6 to 34 rows, each with the same frames to follow in every run."""
    draw, config, found = np.random.default_rng(0), talker.config, []
    for number in range(STREAMS):
        text, codec = (draw.integers(0, 1000, 6 + 4 * number).astype(np.int32) for _ in range(2))
        prompt = Prompt(text, codec, draw.integers(0, 1000, 9).astype(np.int32), num_text_tokens=9)
        frames = list(draw.integers(0, config.code_vocab_size, (FRAMES, config.num_code_groups)).astype(np.int16))
        request = SynthesisRequest(str(number), "text", seed=number, ignore_eos=True)
        limit = FrameLimit(99, FinishReason.LENGTH)
        found.append(Sequence(number, request, prompt, SAMPLED, limit, frames=frames, row=number, frame_s=0.08))
    return found


def logits_of(talker: Talker, networks: NetworkKind) -> Tensor:
    """Float32 logits of codebook 0 [streams, vocab] after the prompts and the frames, which went step by step."""
    like, blocks = talker.codec_head.weight, BlockManager(64, BLOCK_SIZE)
    cache = KVCache(talker.config.talker, num_blocks=64, block_size=BLOCK_SIZE, dtype=like.dtype, device=like.device)
    shape = RunnerShape(STREAMS, 256, networks, deterministic=True)
    tables = InputTables(talker)
    tables.pad = 0  # `random_talker` has few text tokens
    runner = build_runner(tables, cache, blocks, shape)
    speaking = sequences(talker)
    for sequence in speaking:
        blocks.allocate(sequence.id, sequence.num_positions + 1)
    runner.prefill(speaking)
    return talker.logits(runner.state.hidden[:STREAMS])


@torch.inference_mode()
def test_logits_are_those_of_float32_as_far_as_bfloat16_goes() -> None:
    talker = random_talker("1.7B-CustomVoice")
    exact_talker = copy.deepcopy(talker).float()
    exact_talker.prepare(max_positions=4096)
    exact, plain = logits_of(exact_talker, "plain"), logits_of(copy.deepcopy(talker), "plain")
    fused = logits_of(talker, "fused")
    wrong = partial(_relative_error, exact=exact)
    logger.info("relative error of logits: fused %.4f, plain %.4f", wrong(fused), wrong(plain))
    assert wrong(fused) < TOLERANCE
    assert wrong(fused) < 1.1 * wrong(plain)  # sums stay in float32 longer than in the library's kernels


def _relative_error(logits: Tensor, *, exact: Tensor) -> float:
    return float((logits - exact).norm() / exact.norm())
