from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process

from deployments.protocol import DRAWING_OPTIONS, Sampling
from deployments.talker.sampling import torch_sampler
from deployments.talker.sampling.torch_sampler import NoiseKey, apply_repetition_penalty, philox4x32, sample
from deployments.talker.state.batch_state import OPTION_COLUMNS, BatchOptions, DrawingOptions

CPU = torch.device("cpu")
GREEDY = DrawingOptions(do_sample=False, temperature=1.0, top_k=0, top_p=1.0)
OPTIONS = [
    DrawingOptions(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    for temperature in (0.6, 1.0, 1.7)
    for top_k in (0, 1, 7, 500)
    for top_p in (0.05, 0.5, 0.9, 1.0)
]


def draw(rows: int, *, codebook: int = 0, seed: int = 1) -> NoiseKey:
    """A seed for all rows and a frame for each."""
    return NoiseKey(torch.full((rows,), seed), torch.arange(rows), codebook)


def packed(options: list[DrawingOptions]) -> BatchOptions:
    return BatchOptions.of(options, device=CPU)


def by_c(options: list[DrawingOptions], logits: Tensor, drawn: NoiseKey) -> Tensor:
    return torch_sampler.sample_in_c(logits, packed(options), drawn)


def random_logits(rows: int, vocab: int = 100) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))


def hugging_face(logits: Tensor, options: DrawingOptions) -> Tensor:
    warpers = logits_process.LogitsProcessorList([logits_process.TemperatureLogitsWarper(options.temperature)])
    if options.top_k:
        warpers.append(logits_process.TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        warpers.append(logits_process.TopPLogitsWarper(options.top_p))
    warped: Tensor = warpers(torch.zeros(len(logits), 1, dtype=torch.long), logits)
    return warped


def favour(code: Tensor) -> Callable[[NoiseKey, Tensor], Tensor]:
    """Noise that lets `code` [rows] win wherever its probability is not zero."""
    return lambda _, codes: torch.where(codes == code[:, None], 1e-30, 1.0)


def support(logits: Tensor, options: DrawingOptions) -> list[int]:
    """Codes that can be drawn from logits [vocab]."""
    vocab = len(logits)
    wanted = torch.arange(vocab)
    sampled = sample(logits.expand(vocab, -1), packed([options] * vocab), draw(vocab), favour(wanted))
    return wanted[sampled == wanted].tolist()


@pytest.mark.parametrize(("counter", "key", "words"), [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
])  # fmt: skip
def test_philox_gives_the_published_answers(counter: str, key: str, words: str) -> None:
    """Known answers of Random123, philox4x32-10."""
    first, second, third, fourth = (torch.tensor([int(word, 16)]) for word in counter.split())
    low, high = (torch.tensor([int(word, 16)]) for word in key.split())
    made = philox4x32((first, second, third, fourth), (low, high))
    assert [f"{int(word):08x}" for word in made] == words.split()


def test_noise_counts_code_codebook_and_frame_under_the_seed() -> None:
    seed = 0xA4093822_299F31D0 - 2**64  # the bits as the signed number that tensors hold
    codes, frames = torch.tensor([[5, 1023]]), torch.tensor([77])
    noise = torch_sampler.philox_noise(NoiseKey(torch.tensor([seed]), frames, 3), codes)
    counter = (codes, torch.full_like(codes, 3), torch.full_like(codes, 77), torch.zeros_like(codes))
    word = philox4x32(counter, (torch.tensor([[0x299F31D0]]), torch.tensor([[0xA4093822]])))[0]
    assert torch.equal(noise, -((word.double() + 0.5) / 2**32).log().float())


def test_codes_come_as_often_as_the_distribution_says() -> None:
    rows = 40_000
    probs = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01])
    options = [DrawingOptions(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)] * rows
    codes = sample(probs.log().expand(rows, -1), packed(options), draw(rows, codebook=9))
    expected = probs * rows
    chi_square = ((codes.bincount(minlength=7) - expected) ** 2 / expected).sum().item()
    assert chi_square < 22.5  # six degrees of freedom exceed it one time in a thousand


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sampling_equals_hugging_faces(options: DrawingOptions) -> None:
    """With the same noise, the same codes come out of many draws."""
    logits = random_logits(300)
    noise = torch.empty_like(logits).exponential_(generator=torch.Generator().manual_seed(5))
    expected = (hugging_face(logits, options).softmax(-1) / noise).argmax(-1)
    sampled = sample(logits, packed([options] * 300), draw(300), lambda _, codes: noise.gather(-1, codes))
    assert torch.equal(sampled, expected)


def test_top_k_keeps_what_equals_the_kth() -> None:
    logits = torch.tensor([1.0, 5.0, 3.0, 3.0, 0.0, 3.0, 4.0, 3.0])
    options = DrawingOptions(do_sample=True, temperature=1.0, top_k=3, top_p=1.0)
    assert support(logits, options) == [1, 2, 3, 5, 6, 7]
    assert (hugging_face(logits[None], options)[0] > -torch.inf).nonzero()[:, 0].tolist() == [1, 2, 3, 5, 6, 7]
    drawn = sample(logits.expand(200, -1), packed([options] * 200), draw(200))
    assert drawn.unique().tolist() == [1, 2, 3, 5, 6, 7]


def test_top_p_keeps_at_least_the_best() -> None:
    options = DrawingOptions(do_sample=True, temperature=1.0, top_k=0, top_p=1e-9)
    assert support(torch.tensor([0.0, 0.1, 0.0]), options) == [1]


def test_masked_codes_are_never_drawn() -> None:
    logits = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf])
    for top_k in (0, 3):
        assert support(logits, DrawingOptions(do_sample=True, temperature=1.0, top_k=top_k, top_p=1.0)) == [0, 2]


def test_greedy_rows_take_the_best_whatever_the_noise() -> None:
    logits = random_logits(50)
    worst = logits.argmin(-1)
    assert torch.equal(sample(logits, packed([GREEDY] * 50), draw(50), favour(worst)), logits.argmax(-1))


def test_rows_with_options_of_their_own_do_not_touch_each_other() -> None:
    options = [GREEDY, *OPTIONS]
    logits = random_logits(len(options))
    together = sample(logits, packed(options), draw(len(options)))
    for row, each in enumerate(options):
        of_row = NoiseKey(torch.tensor([1]), torch.tensor([row]), 0)
        assert sample(logits[row : row + 1], packed([each]), of_row).item() == together[row].item()
    order = torch.randperm(len(options), generator=torch.Generator().manual_seed(0))
    shuffled = NoiseKey(torch.ones(len(options), dtype=torch.long), order, 0)
    assert torch.equal(sample(logits[order], packed([options[row] for row in order]), shuffled), together[order])


@pytest.mark.skipif(not torch_sampler.IN_C, reason="no C compiler built it")
@pytest.mark.parametrize("vocab", [20, 1024])
def test_the_sampler_in_c_chooses_as_torch_does(vocab: int) -> None:
    options = [each for each in (GREEDY, *OPTIONS) for _ in range(20)]
    logits, drawn = random_logits(len(options), vocab), draw(len(options), codebook=3, seed=-(2**40) - 1)
    logits[:, 1:4] = -torch.inf
    logits[::5, 5:] = -torch.inf  # fewer codes than most values of top-k
    assert torch.equal(by_c(options, logits, drawn), sample(logits, packed(options), drawn))


@pytest.mark.skipif(not torch_sampler.IN_C, reason="no C compiler built it")
def test_a_library_whose_columns_stand_in_another_order_is_refused() -> None:
    assert torch_sampler._built is not None
    first, second, *others = torch_sampler._built.option_columns().decode().split(";")
    with pytest.raises(RuntimeError, match="DrawingOptions packs"):
        torch_sampler.check_columns(";".join([second, first, *others]))


@pytest.mark.parametrize("options", [GREEDY, *OPTIONS], ids=str)
def test_logits_that_are_no_numbers_give_a_code(options: DrawingOptions) -> None:
    """The runner reports such a row afterwards, but looks up the code's embedding first."""
    logits = torch.stack([torch.full((30,), value) for value in (torch.nan, -torch.inf, torch.inf)])
    codes = [sample(logits, packed([options] * 3), draw(3))]
    codes += [by_c([options] * 3, logits, draw(3))] if torch_sampler.IN_C else []
    assert all(((each >= 0) & (each < 30)).all() for each in codes)


@pytest.mark.parametrize("penalty", [1.0, 1.05, 2.0, 0.8])
def test_repetition_penalty_equals_hugging_faces(penalty: float) -> None:
    logits, history = random_logits(6, 30), torch.randint(30, (6, 10), generator=torch.Generator().manual_seed(3))
    seen = torch.zeros(6, 30, dtype=torch.bool).scatter(1, history, value=True)
    expected = logits_process.RepetitionPenaltyLogitsProcessor(penalty)(history, logits)
    assert torch.equal(apply_repetition_penalty(logits, seen, torch.full((6, 1), penalty)), expected)


def test_options_come_from_their_own_half_of_the_request() -> None:
    sampling = Sampling(
        do_sample=True, temperature=0.5, top_k=3, top_p=0.7, subtalker_dosample=False,
        subtalker_temperature=0.6, subtalker_top_k=4, subtalker_top_p=0.8,
    )  # fmt: skip
    assert DrawingOptions.for_talker(sampling) == DrawingOptions(do_sample=True, temperature=0.5, top_k=3, top_p=0.7)
    predictor = DrawingOptions(do_sample=False, temperature=0.6, top_k=4, top_p=0.8)
    assert DrawingOptions.for_predictor(sampling) == predictor


def test_every_filter_has_a_column() -> None:
    assert tuple(OPTION_COLUMNS) == ("do_sample", *DRAWING_OPTIONS)
    packed = DrawingOptions(do_sample=True, temperature=2, top_k=3, top_p=0.5).pack()
    assert packed.tolist() == [1, 0x40000000, 3, 0x3F000000]  # floats as their bits, also of a whole number
