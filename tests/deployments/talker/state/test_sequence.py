"""What a sequence learns from the attention that follows its text."""

import numpy as np
import pytest

from deployments.protocol import FinishReason, Sampling, SynthesisRequest
from deployments.talker.state.sequence import FrameLimit, Sequence, TextProgress
from deployments.talker.text.prompt import Prompt

TOKENS, START = 60, 5
STOP, LOOP, EARLY, RUNAWAY = FinishReason.STOP, FinishReason.LOOP, FinishReason.EARLY, FinishReason.RUNAWAY
PATIENCE = 38  # frames of three seconds


def begun(
    *, word_times: bool, num_frames: int = 0, token_frames: float | None = None, has_all_text: bool = True,
    **asked: bool,
) -> Sequence:  # fmt: skip
    """A sequence of `TOKENS` tokens of one character, behind `num_frames` frames. `asked`: fields of the utterance."""
    ids = np.zeros(START + TOKENS, np.int32)
    prompt = Prompt(ids, ids, ids[:1], num_text_tokens=TOKENS, has_all_text=has_all_text, text_start=START)
    request = SynthesisRequest("0", "text", **asked)  # type: ignore[arg-type]
    starts = list(range(TOKENS + 1)) if word_times else []
    return Sequence(
        0, request, prompt, Sampling(), FrameLimit(1000, FinishReason.LENGTH),
        TextProgress(starts=starts, token_frames=token_frames), [np.zeros(4, np.int16)] * num_frames, frame_s=0.08,
    )  # fmt: skip


def ended(tokens: list[int], *, mass: float = 0.9, word_times: bool = False) -> Sequence:
    """A sequence whose frames attend to these tokens of the text, one after the other, and that ends then."""
    sequence = followed(tokens, mass=mass, word_times=word_times)
    if sequence.finish_reason is None:
        sequence.end()
    return sequence


def followed(
    tokens: list[int], *, mass: float = 0.9, word_times: bool = False, has_all_text: bool = True, **asked: bool
) -> Sequence:
    """A sequence whose frames attend to these tokens, until it ends by itself. `asked`: fields of the utterance."""
    sequence = begun(word_times=word_times, has_all_text=has_all_text, **asked)
    for token in tokens:
        sequence.progress.read(mass, mass * token, sequence.prompt)
        sequence.append(np.zeros(4, np.int16))
        if sequence.finish_reason is not None:
            break
    return sequence


def read(start: int, end: int) -> list[int]:
    """A frame and a half for each token."""
    return [start + int(number / 1.5) for number in range(int((end - start) * 1.5))]


WHOLE = read(0, TOKENS + 1)  # the last one is the position that ends the text


@pytest.mark.parametrize("word_times", [False, True])
@pytest.mark.parametrize(("tokens", "reason"), [
    (read(0, 60), STOP),
    (read(0, 30) + [30] * 100 + read(30, 60), STOP),  # a long sound, or a pause
    (read(0, 30) + read(25, 60), STOP),  # a syllable again
    (read(0, 50) + read(20, 61), STOP),  # three words again, for longer than speech may go on with them at its end
    (read(0, 50) + read(10, 60), LOOP), (read(0, 58) + read(0, 60), LOOP),
])  # fmt: skip
def test_a_passage_spoken_twice_is_no_plain_end(tokens: list[int], reason: FinishReason, word_times: bool) -> None:
    assert ended(tokens, word_times=word_times).finish_reason is reason


def test_attention_that_is_elsewhere_means_nothing() -> None:
    assert ended(read(0, 50) + read(10, 60), mass=0.1).finish_reason is STOP


def test_what_is_read_never_goes_back() -> None:
    readings = ended(read(0, 50) + read(10, 60), word_times=True).progress.pop_places()
    assert list(readings) == sorted(readings)
    assert readings[-1] == pytest.approx(59 - 0.75, abs=1)


@pytest.mark.parametrize("num_frames", [0, 10])
def test_without_a_head_the_number_of_frames_places_them(num_frames: int) -> None:
    sequence = begun(word_times=True, num_frames=num_frames, token_frames=4.0)
    for _ in range(300 - num_frames):
        sequence.append(np.zeros(4, np.int16))
    expected = [min(number / 4, TOKENS) for number in range(num_frames, 300)]
    assert sequence.progress.pop_places() == pytest.approx(tuple(expected))


def test_nobody_reads_where_nobody_asked() -> None:
    sequence = begun(word_times=False, token_frames=4.0)
    sequence.append(np.zeros(4, np.int16))
    assert sequence.progress.pop_places() == ()


@pytest.mark.parametrize(("tokens", "reason"), [
    (WHOLE, STOP),
    (read(0, 60), STOP),  # its last words sound on
    (read(0, 57), EARLY), (read(0, 30), EARLY),
    (read(0, 40) + read(20, 40), EARLY),  # a passage again, too short to count, and then no more
    (read(0, 5), STOP),  # so few frames say nothing about a head
    ([], STOP),  # as a stream that goes on elsewhere and only had to end
    (read(55, 61), STOP), (read(40, 50), EARLY),  # of a stream that goes on elsewhere, what it reads there
    (read(0, 57) + [57] * 200 + read(57, 61), STOP),  # a held sound before the last words
])  # fmt: skip
def test_an_end_with_words_left_is_early(tokens: list[int], reason: FinishReason) -> None:
    assert ended(tokens).finish_reason is reason


@pytest.mark.parametrize(("more", "reason", "num_more"), [
    ([TOKENS] * 20, None, 20),  # the last sound dies away
    ([TOKENS] * 99, RUNAWAY, PATIENCE),
    ([TOKENS - 5, TOKENS] * 60, RUNAWAY, PATIENCE),  # it wavers
    (read(20, 60), LOOP, PATIENCE // 2), (read(0, 10) + [TOKENS] * 99, RUNAWAY, PATIENCE),
])  # fmt: skip
def test_speech_with_no_words_left_is_ended(more: list[int], reason: FinishReason | None, num_more: int) -> None:
    sequence = followed(WHOLE + more)
    assert sequence.finish_reason is reason
    assert 0 <= len(WHOLE) + num_more - sequence.num_frames <= 5  # of the words, the last frames count too


def test_attention_that_leaves_the_text_after_its_end_is_a_runaway() -> None:
    sequence = followed(WHOLE)
    while sequence.finish_reason is None:
        sequence.progress.read(0.05, 0.0, sequence.prompt)
        sequence.append(np.zeros(4, np.int16))
    assert sequence.finish_reason is RUNAWAY
    assert sequence.num_frames <= len(WHOLE) + PATIENCE


def test_marks_at_the_end_of_a_text_are_not_missed() -> None:
    for num_unspoken, reason in ((0, EARLY), (4, STOP)):
        sequence = followed(read(0, TOKENS - 4))
        sequence.progress.num_unspoken = num_unspoken
        sequence.end()
        assert sequence.finish_reason is reason


@pytest.mark.parametrize("options", [{"has_all_text": False}, {"ignore_eos": True}])
def test_who_may_still_speak_has_no_end_to_pass(options: dict[str, bool]) -> None:
    assert followed(WHOLE + [TOKENS] * 200, **options).finish_reason is None
