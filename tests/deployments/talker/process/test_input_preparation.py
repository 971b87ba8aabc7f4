"""Recordings that are encoded while the engine's steps go on, with an encoder that is done when a test says so."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.protocol import ClonePrompt, Reference, SynthesisRequest
from deployments.recording_cache import Lookups
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import warm_up
from deployments.talker.process.channel import Submit
from deployments.talker.process.engine_process import InputPreparation
from tests.deployments.talker.driving import Encoding, Recordings, ask, speak

RECORDING = np.random.default_rng(0).uniform(-0.5, 0.5, 9600).astype(np.float32)
CODES = np.random.default_rng(1).integers(0, 2048, (5, 16)).astype(np.int16)
IN_CONTEXT = ask("In context.", frames=9, voice=None, ignore_eos=True, reference=Reference(RECORDING, "Said."))
BY_VECTOR = replace(IN_CONTEXT, reference=Reference(RECORDING, x_vector_only=True))


@pytest.fixture
def engine(engine_of: Callable[[str], Engine]) -> Iterator[Engine]:
    engine = engine_of("Base")
    vector = np.full(engine.prompts.tables.text.shape[1], 0.1, np.float32)
    recordings: Any = Recordings(lambda each: ClonePrompt(vector, None if each.x_vector_only else CODES))
    engine.prompts.recordings = recordings
    caches = engine.prompts.speakers, engine.prompts.references
    for cache in caches:
        cache.take_lookups()
    yield engine
    engine.prompts.recordings = None
    engine.forget((IN_CONTEXT.reference.key[:16],))  # type: ignore[union-attr]
    for cache in caches:
        cache._forgotten.clear()


def started(engine: Engine) -> list[Encoding]:
    recordings: Any = engine.prompts.recordings
    every: list[Encoding] = recordings.started
    return every


def test_an_encoded_recording_is_found_in_the_cache(engine: Engine) -> None:
    preparation = InputPreparation(engine)
    assert preparation.ready_commands([Submit(1, IN_CONTEXT)]) == []
    started(engine)[0].is_done = True
    (submit,) = preparation.ready_commands([])
    assert isinstance(submit, Submit)
    spoken = speak(engine, submit.request)
    for again in (IN_CONTEXT, BY_VECTOR):
        assert preparation.ready_commands([Submit(2, again)]) == [Submit(2, again)]
    assert np.array_equal(speak(engine, IN_CONTEXT).codes, spoken.codes)
    assert len(started(engine)) == 1
    caches = engine.prompts.speakers, engine.prompts.references
    assert [cache.take_lookups() for cache in caches] == [Lookups(hits=1, misses=1)] * 2


def test_a_vector_alone_does_not_replace_codes(engine: Engine) -> None:
    preparation = InputPreparation(engine)
    preparation.ready_commands([Submit(1, BY_VECTOR)])
    started(engine)[0].is_done = True
    preparation.ready_commands([])
    assert preparation.ready_commands([Submit(2, IN_CONTEXT)]) == []
    assert len(started(engine)) == 2


def test_a_warm_up_is_no_lookup(engine: Engine) -> None:
    warm_up(engine)
    assert len(started(engine)) > 0
    assert [cache.take_lookups() for cache in (engine.prompts.speakers, engine.prompts.references)] == [Lookups()] * 2


def test_an_engine_that_is_asked_directly_waits(engine: Engine) -> None:
    assert len(speak(engine, IN_CONTEXT).codes) == 9


def too_short(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> SynthesisRequest:
    return replace(IN_CONTEXT, reference=Reference(RECORDING[:100], "Said."))
