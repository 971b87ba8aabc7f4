"""What a sequence learns from the attention that follows its text."""

import numpy as np
import pytest

from deployments.protocol import FinishReason, GenerateRequest, Sampling, SynthesisRequest
from deployments.talker.prompt import Prompt
from deployments.talker.sequence import FrameLimit, Sequence

TOKENS, START = 60, 5
STOP, LOOP = FinishReason.STOP, FinishReason.LOOP


def ended(tokens: list[int], *, mass: float = 0.9, word_times: bool = False) -> Sequence:
    """A sequence whose frames attend to these tokens of the text, one after the other."""
    ids = np.zeros(START + TOKENS, np.int32)
    prompt = Prompt(ids, ids, ids[:1], num_text_tokens=TOKENS, text_start=START)
    request = GenerateRequest(SynthesisRequest("0", "text"))
    starts = list(range(TOKENS + 1)) if word_times else []
    sequence = Sequence(
        0, request, prompt, Sampling(), FrameLimit(1000, FinishReason.LENGTH), token_starts=starts, frame_s=0.08
    )
    for token in tokens:
        sequence.read(mass, mass * token)
        sequence.append(np.zeros(4, np.int16))
    sequence.end()
    return sequence


def read(start: int, end: int) -> list[int]:
    """A frame and a half for each token."""
    return [start + int(number / 1.5) for number in range(int((end - start) * 1.5))]


@pytest.mark.parametrize("word_times", [False, True])
@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (read(0, 60), STOP),
        (read(0, 30) + [30] * 100 + read(30, 60), STOP),  # a long sound, or a pause
        (read(0, 30) + read(25, 60), STOP),  # a syllable again
        (read(0, 50) + read(10, 60), LOOP),
        (read(0, 58) + read(0, 60), LOOP),
    ],
)
def test_a_passage_that_is_spoken_twice_is_no_plain_end(
    tokens: list[int], reason: FinishReason, word_times: bool
) -> None:
    assert ended(tokens, word_times=word_times).finish_reason is reason


def test_attention_that_is_elsewhere_means_nothing() -> None:
    assert ended(read(0, 50) + read(10, 60), mass=0.1).finish_reason is STOP


def test_what_is_read_never_goes_back() -> None:
    readings = ended(read(0, 50) + read(10, 60), word_times=True).readings
    assert readings == sorted(readings)
    assert readings[-1] == pytest.approx(59 - 0.75, abs=1)
