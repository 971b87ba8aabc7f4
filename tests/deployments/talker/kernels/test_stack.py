"""Whole stacks and frames against the modules they stand for."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: make kernels installs it")

from deployments.talker.kernels.paged_attention import choose_attention
from deployments.talker.model.layers import attend_rows
from deployments.talker.model.talker import FrameAttention, Talker
from deployments.talker.networks.fused_networks import FusedPredictor, PackedPredictor
from deployments.talker.networks.fused_stack import FrameCache, FusedStack, PackedStack
from deployments.talker.sampling import torch_sampler
from deployments.talker.sampling.torch_sampler import NoiseKey
from deployments.talker.state.batch_state import BatchOptions, Context, DrawingOptions
from deployments.talker.state.kv_cache import KVCache

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
BLOCK_SIZE, LENGTHS = 16, [1, 40, 77]
ROWS = len(LENGTHS)


def contexts(device: torch.device) -> tuple[Context, torch.Tensor]:
    """Places, and the slots of every position [rows, positions] they come from."""
    blocks = -(-max(LENGTHS) // BLOCK_SIZE)
    tables = (torch.randperm(ROWS * blocks, generator=torch.Generator().manual_seed(1)) + 1).view(ROWS, blocks)
    lengths = torch.tensor(LENGTHS)
    everywhere = (tables[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)
    slots = everywhere.gather(1, lengths[:, None] - 1)[:, 0]
    context = Context(
        (lengths - 1).int().to(device), slots.to(device), tables.int().to(device), lengths.int().to(device)
    )
    return context, everywhere.to(device)


def test_talker_step(talker: Talker, device: torch.device) -> None:
    config = talker.config.talker
    cache = KVCache(config, num_blocks=32, block_size=BLOCK_SIZE, dtype=torch.float32, device=device)
    cache.blocks.normal_()
    plain = deepcopy(cache)
    context, everywhere = contexts(device)
    mask = (torch.arange(everywhere.shape[1], device=device) < context.lengths[:, None])[:, None, None]

    def attend_plainly(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        plain.keys[layer, context.slot_mapping], plain.values[layer, context.slot_mapping] = key, value
        keys, values = (each[layer, everywhere].transpose(1, 2) for each in (plain.keys, plain.values))
        return attend_rows(query, keys, values, mask)

    x = torch.randn(ROWS, config.hidden_size, device=device)
    stack = FusedStack(PackedStack.pack_in_place(talker.model, config, positions=128), max_rows=4, pdl=False)
    attend = choose_attention("auto", stack.heads, block_size=BLOCK_SIZE, dtype=torch.float32, pdl=False)
    assert attend.name == "triton"

    got = stack.talker_step(x, context, cache, attend)

    torch.testing.assert_close(got, talker(x, context.positions.long(), attend_plainly), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(cache.keys, plain.keys, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(cache.values, plain.values, atol=2e-3, rtol=2e-3)


def test_predictor_passes(talker: Talker, device: torch.device) -> None:
    config, model = talker.config.predictor, talker.code_predictor
    stack = FusedStack(PackedStack.pack_in_place(model.model, config, positions=5), max_rows=4, pdl=False)
    cache = FrameCache(config, num_rows=4, positions=4, like=model.model.norm.weight)
    attention = FrameAttention((config.num_layers, ROWS, config.num_kv_heads, 4, config.head_dim), like=cache.keys)
    for position in range(3):
        x = torch.randn(ROWS, config.hidden_size, device=device)
        got = model.model.norm(stack.codebook_step(stack.measured(x), position, cache).values)
        rotation = model.rotary(torch.full((ROWS,), position, device=device))
        torch.testing.assert_close(got, model.model(x, rotation, attention), atol=2e-3, rtol=2e-3)
        attention.step += 1


def test_a_frame_has_the_codes_of_the_plain_predictor(talker: Talker, device: torch.device) -> None:
    hidden = torch.randn(ROWS, talker.config.talker.hidden_size, device=device)
    code0 = torch.tensor([1, 2, 3], device=device)
    noise_key = NoiseKey(torch.tensor([1, -5, 1 << 40], device=device), torch.tensor([0, 5, 9], device=device), 0)
    options = BatchOptions.of(
        [
            DrawingOptions(do_sample=True, temperature=0.9, top_k=50, top_p=1.0),
            DrawingOptions(do_sample=True, temperature=0.8, top_k=20, top_p=0.7),
            DrawingOptions(do_sample=False, temperature=1.0, top_k=50, top_p=1.0),
        ],
        device=device,
    )
    predictor = FusedPredictor(PackedPredictor.pack_in_place(talker), max_rows=4, pdl=False)
    codes = predictor.predict_frame(hidden, code0, options, noise_key)

    def sample(logits: torch.Tensor, codebook: int) -> torch.Tensor:
        return torch_sampler.sample(logits, options, replace(noise_key, codebook=codebook))

    expected, total = talker.code_predictor(hidden, code0, talker.model.codec_embedding(code0), sample=sample)
    assert torch.equal(codes, expected)
    torch.testing.assert_close(predictor.totals[: len(codes)], total)
