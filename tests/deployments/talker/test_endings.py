"""Speech of the embedded voice that ends well, too early or not at all, as its alignment head sees it."""

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


@pytest.fixture(scope="module")
def embedded() -> Engine:
    return build_engine(locate("embedded"), TalkerConfig(device="cpu"))


def each_voice(*, seed: int = 3, frames: int = 400, **asked: object) -> list[SynthesisRequest]:
    return [ask(TEXT, voice=voice, seed=seed, frames=frames, **asked) for voice in VOICES]


@pytest.fixture(scope="module")
def undisturbed(embedded: Engine) -> list[Spoken]:
    return speak_all(embedded, each_voice())


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
