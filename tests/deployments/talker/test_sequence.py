"""What a sequence learns from the attention that follows its text."""

import numpy as np
import pytest

from deployments.protocol import FinishReason, GenerateRequest, Sampling, SynthesisRequest
from deployments.talker.prompt import Prompt
from deployments.talker.sequence import FrameLimit, Sequence

TOKENS, START = 60, 5
STOP, LOOP = FinishReason.STOP, FinishReason.LOOP


def begun(*, word_times: bool, num_frames: int = 0, token_frames: float | None = None) -> Sequence:
    """A sequence of `TOKENS` tokens of one character, which goes on behind `num_frames` frames."""
    ids = np.zeros(START + TOKENS, np.int32)
    prompt = Prompt(ids, ids, ids[:1], num_text_tokens=TOKENS, text_start=START)
    request = GenerateRequest(SynthesisRequest("0", "text"))
    starts = list(range(TOKENS + 1)) if word_times else []
    return Sequence(
        0, request, prompt, Sampling(), FrameLimit(1000, FinishReason.LENGTH), [np.zeros(4, np.int16)] * num_frames,
        token_starts=starts, token_frames=token_frames, frame_s=0.08,
    )  # fmt: skip


def ended(tokens: list[int], *, mass: float = 0.9, word_times: bool = False) -> Sequence:
    """A sequence whose frames attend to these tokens of the text, one after the other."""
    sequence = begun(word_times=word_times)
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


@pytest.mark.parametrize("num_frames", [0, 10])
def test_without_a_head_the_number_of_frames_places_them(num_frames: int) -> None:
    sequence = begun(word_times=True, num_frames=num_frames, token_frames=4.0)
    for _ in range(300 - num_frames):
        sequence.append(np.zeros(4, np.int16))
    expected = [min(number / 4, TOKENS) for number in range(num_frames, 300)]
    assert sequence.readings == pytest.approx(expected)


def test_nobody_reads_where_nobody_asked() -> None:
    sequence = begun(word_times=False, token_frames=4.0)
    sequence.append(np.zeros(4, np.int16))
    assert sequence.readings == []
