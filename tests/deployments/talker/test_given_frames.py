"""Voices whose speech begins with silence that everybody knows: it is given to the talker, not made by it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deployments.protocol import Codes, GenerateRequest
from deployments.talker.engine import Engine
from deployments.talker.loading import build_engine
from tests.deployments.talker.conftest import CONFIG
from tests.deployments.talker.driving import ask, resumed, speak, speak_all
from tests.deployments.talker.test_live_text import write

OPENING = np.arange(48, dtype=np.int16).reshape(3, 16)
HELLO = ask("Hello there.", seed=1, frames=15, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = tmp_path_factory.mktemp("opening") / "checkpoint"
    shutil.copytree(tiny_checkpoint("CustomVoice"), directory)
    config = json.loads((directory / "config.json").read_text())
    needs = {"alignment_head": [1, 1], "openings": {"ryan": OPENING.tolist()}}
    (directory / "config.json").write_text(json.dumps({**config, "talkray": needs}))
    return build_engine(directory, CONFIG)


def with_silence(request: GenerateRequest) -> GenerateRequest:
    return replace(request, synthesis=replace(request.synthesis, leading_silence=True))


def first_codes(engine: Engine, request: GenerateRequest) -> Codes:
    """Of the first step that brings any."""
    engine.add(0, request)
    [(_, chunk)] = engine.step().chunks
    engine.abort(0)
    return chunk.codes


def test_a_first_step_brings_the_opening_and_a_frame_more(engine: Engine) -> None:
    codes = first_codes(engine, HELLO)
    assert len(codes) == 4
    assert np.array_equal(codes[:3], OPENING)


@pytest.mark.parametrize("text", ["Hello there.", "Oh"])
def test_text_that_streams_has_it_too_also_while_it_is_written(engine: Engine, text: str) -> None:
    asked = ask(text, seed=1, frames=15, ignore_eos=True, non_streaming_mode=False)
    at_once = speak(engine, asked)
    assert np.array_equal(first_codes(engine, asked), at_once.codes[:4])
    assert np.array_equal(at_once.codes[:3], OPENING)
    assert np.array_equal(write(engine, list(text), asked).codes, at_once.codes)
    rest = write(engine, list(text), resumed(asked, at_once.codes[:2]))
    assert np.array_equal(rest.codes, at_once.codes[2:])


def test_an_opening_counts_like_frames_that_were_made(engine: Engine) -> None:
    spoken = speak(engine, HELLO)
    assert len(spoken.codes) == 15
    assert np.array_equal(spoken.codes[:3], OPENING)


def test_what_follows_is_equal_beside_others_and_resumed(engine: Engine) -> None:
    spoken = speak(engine, HELLO).codes
    others = [ask(f"Number {number}.", seed=number, frames=9, ignore_eos=True) for number in range(2, 6)]
    assert np.array_equal(speak_all(engine, [*others, HELLO], steps_between=1)[-1].codes, spoken)
    for cut in (2, 3, 4, 9):
        assert np.array_equal(speak(engine, resumed(HELLO, spoken[:cut])).codes, spoken[cut:])


@pytest.mark.parametrize(
    "request_",
    [
        with_silence(HELLO),
        ask("Hello there.", seed=1, frames=15, ignore_eos=True, voice="vivian"),
        ask("Hello there.", seed=1, frames=3, ignore_eos=True),
    ],
    ids=["silence is wanted", "another voice", "not a frame more is allowed"],
)
def test_others_are_made_from_their_first_frame(engine: Engine, request_: GenerateRequest) -> None:
    assert len(first_codes(engine, request_)) == 1


def test_readings_go_with_the_frames(engine: Engine) -> None:
    request = replace(HELLO, synthesis=replace(HELLO.synthesis, word_times=True))
    engine.add(0, request)
    chunks = []
    while not engine.is_idle:
        chunks += [chunk for _, chunk in engine.step().chunks]
    readings = [
        (each.first + number) for chunk in chunks for each in chunk.readings for number in range(len(each.chars))
    ]
    assert readings == list(range(15))
