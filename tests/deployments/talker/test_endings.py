"""Speech of the embedded voice that ends well, too early or not at all, as its alignment head sees it."""

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from torch import Tensor

from deployments.protocol import FinishReason, SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import TalkerConfig, build_engine
from deployments.talker.networks.unfused_networks import UnfusedNetworks
from deployments.talker.state.batch_state import Breadth
from deployments.weights.store import locate
from tests.deployments.talker.driving import Spoken, ask, speak_all
from tests.deployments.talker.engine.test_engine import push_end_of_speech
from tools.listening.texts import texts

VOICES = ("nora", "felix", "iris", "hugo", "otto", "miles", "lily", "edith")
TEXT = "The train to the coast leaves at nine, and the next one only in the evening."
PATIENCE = 38  # frames of three seconds
EARLY, STOP, LOOP, RUNAWAY = FinishReason.EARLY, FinishReason.STOP, FinishReason.LOOP, FinishReason.RUNAWAY
Readings = Callable[[int], float]  # the token that a sequence reads, by its frame


@pytest.fixture(scope="module")
def embedded() -> Engine:
    return build_engine(locate("embedded"), TalkerConfig(device="cpu"))


def each_voice(*, seed: int = 3, frames: int = 400, **asked: object) -> list[SynthesisRequest]:
    return [ask(TEXT, voice=voice, seed=seed, frames=frames, **asked) for voice in VOICES]


@pytest.fixture(scope="module")
def undisturbed(embedded: Engine) -> list[Spoken]:
    return speak_all(embedded, each_voice())


def replace_readings(monkeypatch: pytest.MonkeyPatch, read_at: Readings) -> None:
    """Of every sequence: its attention is on `read_at` of its frame."""

    def forced(networks: UnfusedNetworks, rows: Tensor, _: Tensor) -> None:
        tokens = torch.tensor([read_at(int(networks.state.num_frames[row])) for row in rows.tolist()])
        networks.readings[: len(rows), 0], networks.readings[: len(rows), 1] = 1.0, tokens

    monkeypatch.setattr(UnfusedNetworks, "_read", forced)


def end_at(monkeypatch: pytest.MonkeyPatch, frame: int) -> None:
    """Every sequence samples the end of speech in place of `frame`, and never before."""
    push_end_of_speech(monkeypatch, -1e9)
    sample = UnfusedNetworks._sample_code0

    def ending(networks: UnfusedNetworks, rows: Tensor, hidden: Tensor, breadth: Breadth) -> Tensor:
        return torch.where(
            networks.state.num_frames[rows] == frame, networks.config.codes.eos, sample(networks, rows, hidden, breadth)
        )

    monkeypatch.setattr(UnfusedNetworks, "_sample_code0", ending)


def test_every_voice_speaks_differently_and_ends(undisturbed: list[Spoken]) -> None:
    assert [spoken.reason for spoken in undisturbed] == [STOP] * len(VOICES)
    assert len({spoken.codes.tobytes() for spoken in undisturbed}) == len(VOICES)


def test_no_good_end_is_called_anything_else(embedded: Engine) -> None:
    """Text in the prompt and text beside the frames take turns."""
    requests = [
        ask(text.spoken, voice=voice, seed=number, frames=600, non_streaming_mode=number % 2 == 0)
        for number, text in enumerate(islice(texts("english"), 6))
        for voice in VOICES
    ]
    assert [spoken.reason for spoken in speak_all(embedded, requests, steps_between=9)] == [STOP] * len(requests)


@pytest.mark.parametrize("marks", ["", "?!?!", ".\u201d", ' \u2013 "', " :)"])
def test_marks_at_the_end_need_not_be_read(embedded: Engine, marks: str) -> None:
    text = "The boat drifted on the lake" + marks
    requests = [
        ask(text, voice=voice, seed=number, frames=200, non_streaming_mode=number % 2 == 0)
        for number, voice in enumerate(2 * VOICES)
    ]
    assert [spoken.reason for spoken in speak_all(embedded, requests)] == [STOP] * len(requests)


@pytest.mark.parametrize("at", [0.4, 0.7])
def test_an_end_in_the_middle_is_early(
    embedded: Engine, undisturbed: list[Spoken], monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    frame = int(at * min(len(spoken.codes) for spoken in undisturbed))
    end_at(monkeypatch, frame)
    ends = [(len(spoken.codes), spoken.reason) for spoken in speak_all(embedded, each_voice())]
    assert ends == [(frame, EARLY)] * len(VOICES)


@pytest.mark.parametrize("non_streaming_mode", [False, True])
def test_speech_that_misses_its_end_is_ended_soon(
    embedded: Engine, undisturbed: list[Spoken], monkeypatch: pytest.MonkeyPatch, non_streaming_mode: bool
) -> None:
    """The voice begins the text again by itself, or murmurs on."""
    push_end_of_speech(monkeypatch, -1e9)
    late = speak_all(embedded, each_voice(non_streaming_mode=non_streaming_mode))
    assert {spoken.reason for spoken in late} <= {LOOP, RUNAWAY}
    for spoken, good in zip(late, undisturbed, strict=True):
        assert len(spoken.codes) <= len(good.codes) + 1.5 * PATIENCE


@pytest.mark.parametrize(
    ("after", "reason", "most"), [(lambda frame: frame % 15, LOOP, PATIENCE // 2), (lambda _: 31.0, RUNAWAY, PATIENCE)]
)
def test_what_is_read_after_the_end_says_what_is_wrong(
    embedded: Engine, monkeypatch: pytest.MonkeyPatch, after: Readings, reason: FinishReason, most: int
) -> None:
    push_end_of_speech(monkeypatch, -1e9)
    replace_readings(monkeypatch, lambda frame: frame / 2 if frame < 64 else after(frame))
    for spoken in speak_all(embedded, each_voice()):
        assert spoken.reason is reason
        assert 64 <= len(spoken.codes) <= 64 + most + 2


def test_a_passage_that_is_spoken_twice_is_told_at_the_end(embedded: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not cut there, because words follow."""
    end_at(monkeypatch, 166)

    def read_at(frame: int) -> float:
        again = (frame - 40) / 8 if frame < 120 else 10 + (frame - 120) / 2
        return frame / 2 if frame < 40 else again

    replace_readings(monkeypatch, read_at)
    ends = [(len(spoken.codes), spoken.reason) for spoken in speak_all(embedded, each_voice())]
    assert ends == [(166, LOOP)] * len(VOICES)
