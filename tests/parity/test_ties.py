"""What `make parity` takes for a near-tie of float32, and what it does not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.codec.encoder import CodecEncoder
from deployments.talker.state.batch_state import BatchOptions, DrawingOptions
from talkray_tools.choices import Choice, Divergence, near_ties, nearest_divergences
from tools.experiments.parity.cases import reference_audio
from tools.experiments.parity.run import TIE, equal_codes, equal_reference

CODES = np.zeros((4, 16), np.int16)


def choice(logits: list[float], **options: float) -> Choice:
    row = BatchOptions.of([DrawingOptions(do_sample=True, **options)], device=torch.device("cpu"))  # type: ignore[arg-type]
    return Choice.by(row, torch.tensor(logits), torch.ones(len(logits)))


EVEN = 1 / (1 + np.e + np.e**2 + np.e**3)  # the probability of the last of four that are 1 apart


@pytest.mark.parametrize(("logits", "options", "codes", "margin"), [
    ([3.0, 2.0, 2.0, 0.0], {"top_k": 2}, (1, 2), 0.0),  # twins at the border
    ([3.0, 2.0, 1.5, 0.0], {"top_k": 2}, (1, 2), 0.5),
    ([3.0, 2.0, 1.5, 0.0], {"top_k": 2}, (0, 1), 0.5),  # though 1 is the last one
    ([3.0, 2.9, 1.5, 0.0], {"top_k": 2}, (0, 1), 0.1), ([3.0, 2.9, 1.5, 0.0], {"top_k": 4}, (1, 2), 1.4),
    ([3.0, 2.0, 1.5, 0.0], {"top_k": 2}, (0, 3), 1.5),
    ([1.0, 1.0, 1.0, 1.0], {"top_p": 0.7}, (0, 3), 0.0),  # twins, of which one goes
    ([3.0, 2.0, 1.0, 0.0], {"top_p": 1 - EVEN - 1e-7}, (0, 3), 0.0),  # a rounding decides whether it goes
    ([3.0, 2.0, 1.0, 0.0], {"top_p": 0.98}, (0, 3), EVEN - 0.02),
    ([3.0, 2.0, 1.0, 0.0], {"top_p": 0.9}, (0, 1), 0.2561),
])  # fmt: skip
def test_filters_decide(logits: list[float], options: dict[str, float], codes: tuple[int, int], margin: float) -> None:
    assert choice(logits, **options).margin(*codes) == pytest.approx(margin, abs=1e-4)


def test_one_frame_of_the_shortest_speech_may_be_a_tie() -> None:
    tie = Divergence(0, 2, 1e-6)
    assert near_ties([tie], CODES, TIE)[0]
    assert not near_ties([tie, tie], CODES, TIE)[0]
    assert not near_ties([Divergence(0, 2, 1e-4)], CODES, TIE)[0]


def test_codes_that_differ_need_a_reason() -> None:
    other = CODES + 1
    tied = equal_codes("a", CODES, other, lambda: [Divergence(0, 2, 1e-6)])
    assert (tied.passed, tied.num_ties) == (True, 1)
    assert "1 of them differ, first in frame 0, codebook 2" in tied.detail
    assert not equal_codes("a", CODES, other, list).passed
    assert not equal_codes("a", CODES, other[:2], lambda: [Divergence(0, 2, 0.1)]).passed


def test_a_wrong_code_of_a_recording_is_found_where_it_is(tiny_checkpoint: Callable[[str], Path]) -> None:
    encoder = CodecEncoder.load(tiny_checkpoint("base") / "speech_tokenizer")
    audio = reference_audio(24000)
    codes = encoder.encode(audio)
    assert nearest_divergences(encoder, audio, codes) == []
    wrong = codes.copy()
    wrong[3, 5] = (wrong[3, 5] + 1) % 2048
    first, *_ = nearest_divergences(encoder, audio, wrong)
    assert (first.frame, first.codebook) == (3, 5)
    assert first.margin > 0
    assert not equal_reference("a", encoder, audio, wrong).passed
    assert equal_reference("a", encoder, audio, codes).passed
