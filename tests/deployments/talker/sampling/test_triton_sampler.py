import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: make kernels installs it")

from deployments.talker.kernels.matmul import like_rows
from deployments.talker.sampling import triton_sampler
from deployments.talker.sampling.torch_sampler import NoiseKey, sample
from deployments.talker.state.batch_state import BatchOptions, DrawingOptions
from tools.kernels.reference import reference_first_code

VOCAB, WIDTH, WIDE, GROUPS = 200, 24, 40, 3
OPTIONS = [
    DrawingOptions(do_sample=True, temperature=0.9, top_k=50, top_p=1.0),
    DrawingOptions(do_sample=True, temperature=0.7, top_k=0, top_p=1.0),
    DrawingOptions(do_sample=True, temperature=1.3, top_k=30, top_p=0.6),
    DrawingOptions(do_sample=True, temperature=1.0, top_k=1000, top_p=1.0),
    DrawingOptions(do_sample=False, temperature=1.0, top_k=50, top_p=1.0),
    DrawingOptions(do_sample=True, temperature=1.0, top_k=0, top_p=0.001),
]
ROWS = len(OPTIONS)


def draw_of(codebook: int, device: torch.device) -> NoiseKey:
    seeds = torch.tensor([0, -1, 1 << 40, 77, 5, -(1 << 63)], device=device)
    return NoiseKey(seeds, torch.arange(ROWS, device=device) * 100, codebook)


@pytest.mark.parametrize("logits_type", [torch.float32, torch.bfloat16])
def test_codes_and_what_becomes_of_them(logits_type: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    both = [[torch.randn(VOCAB, size, generator=generator).to(device) for size in (WIDTH, WIDE)] for _ in range(GROUPS)]
    tables = [triton_sampler.Embeddings(*each) for each in both]
    options = BatchOptions.of(OPTIONS, device=device)
    outputs = triton_sampler.FrameOutputs(
        torch.zeros(ROWS, GROUPS, dtype=torch.long, device=device),
        torch.full((ROWS, WIDE), torch.nan, device=device),
        torch.full((ROWS, WIDE), torch.nan, device=device),
    )
    inputs = like_rows(ROWS, WIDTH, tables[0].projected)
    code0 = torch.arange(ROWS, device=device) * 30
    both = like_rows(2 * ROWS, WIDTH, tables[0].projected)
    both.values.normal_()
    triton_sampler.begin_frame(code0, tables[0], both, outputs)
    expected = [code0]
    torch.testing.assert_close(both.values[ROWS:], tables[0].projected[code0], atol=0, rtol=0)
    torch.testing.assert_close(both.squares[0, : 2 * ROWS], both.values.square().sum(1))
    for codebook in (1, 2):
        logits = (3 * torch.randn(ROWS, VOCAB, generator=generator)).to(device, logits_type)
        noise_key = draw_of(codebook, device)
        triton_sampler.sample_code(logits, options, noise_key, tables[codebook], inputs, outputs)
        expected.append(sample(logits.float(), options, noise_key))
    assert torch.equal(outputs.codes, torch.stack(expected, 1))
    sums = torch.stack([table.summed[codes] for table, codes in zip(tables, expected, strict=True)]).sum(0)
    torch.testing.assert_close(outputs.total, sums)
    torch.testing.assert_close(inputs.values, tables[1].projected[expected[1]], atol=0, rtol=0)
    torch.testing.assert_close(inputs.squares[0, :ROWS], inputs.values.square().sum(1))


def test_first_code_is_penalised_suppressed_and_remembered(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    seen = (torch.rand(ROWS + 2, VOCAB, generator=generator) < 0.3).to(device)
    suppressed = torch.arange(VOCAB, device=device) >= 150
    eos = 160
    suppressed[eos] = False
    rules = triton_sampler.FirstCodeRules(
        state_rows=torch.tensor([7, 0, 3, 2, 5, 1], device=device), seen=seen.clone(),
        penalty=torch.tensor([[1.05], [1.5], [1.0], [2.0], [1.05], [1.05]], device=device),
        suppressed=suppressed,
        ignore_eos=torch.tensor([False, True, False, False, False, True], device=device),
        eos=eos, min_new_tokens=2,
    )  # fmt: skip
    options, noise_key = BatchOptions.of(OPTIONS, device=device), draw_of(0, device)
    logits = (3 * torch.randn(ROWS, VOCAB, generator=generator)).to(device)
    logits[:, eos] = 30.0
    expected = reference_first_code(logits, options, noise_key, rules)
    assert (expected == eos).tolist() == [False, False, True, True, True, False]
    code0 = torch.full((ROWS,), -1, device=device)
    triton_sampler.sample_first_code(logits, options, noise_key, rules, code0)
    assert torch.equal(code0, expected)
    seen[rules.state_rows, expected] = True
    assert torch.equal(rules.seen, seen)
