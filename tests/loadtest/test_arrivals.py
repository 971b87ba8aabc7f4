from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from loadtest import arrivals as module
from loadtest.settings import Settings


def times(arrivals: module.Arrivals, rate: float, duration_s: float) -> list[float]:
    return module.phase_times(arrivals, module.Phase("all", rate, duration_s), seed=(1, 0))


def test_constant_arrivals_are_evenly_spaced_and_end_before_the_end() -> None:
    assert times(module.Arrivals.CONSTANT, 4, 1.0) == [0.0, 0.25, 0.5, 0.75]
    assert times(module.Arrivals.CONSTANT, 0.5, 1.0) == [0.0]


def test_poisson_arrivals_ascend_within_the_duration() -> None:
    times_s = times(module.Arrivals.POISSON, 50, 4.0)
    assert times_s == sorted(times_s)
    assert times_s[0] >= 0
    assert times_s[-1] < 4.0


def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential() -> None:
    times_s = times(module.Arrivals.POISSON, 100, 100.0)
    gaps = [after - before for before, after in pairwise(times_s)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.01, rel=0.05)
    assert variance**0.5 == pytest.approx(0.01, rel=0.05)


PHASES = (module.Phase("slow", 5, 2.0), module.Phase("fast", 50, 2.0))


@pytest.mark.parametrize("arrivals", module.Arrivals)
def test_the_seed_settles_the_plan(arrivals: module.Arrivals) -> None:
    settings = Settings("http://h:1", PHASES, arrivals=arrivals, seed=5)
    first = settings.schedule()
    assert first == settings.schedule()
    assert first != replace(settings, seed=6).schedule()
    assert [request.planned_s for request in first] == module.arrival_times(arrivals, PHASES, seed=5)
    assert [request.index for request in first] == list(range(len(first)))


def test_every_phase_has_its_own_rate() -> None:
    times_s = module.arrival_times(module.Arrivals.CONSTANT, PHASES, seed=0)
    slow, fast = module.place(PHASES)
    assert times_s == sorted(times_s)
    assert [sum(phase.holds(time_s) for time_s in times_s) for phase in (slow, fast)] == [10, 100]
    assert (slow.start_s, slow.end_s, fast.start_s, fast.end_s) == (0.0, 2.0, 2.0, 4.0)


def test_lengths_are_log_normal_within_bounds_and_settled_by_the_seed() -> None:
    lengths = module.SpeechLengths(5.7, 0.35)
    frames = lengths.draw(2000, seed=1)
    assert frames == lengths.draw(2000, seed=1)
    assert sorted(frames)[1000] == pytest.approx(5.7 * 12.5, rel=0.03)
    assert module.SpeechLengths(0.01, 0.0).draw(1, seed=0) == [module.MIN_S * 12.5]
    assert module.SpeechLengths(1000.0, 0.0).draw(1, seed=0) == [module.MAX_S * 12.5]


def test_every_sentence_comes_once_before_any_comes_again() -> None:
    size = len(module.SENTENCES)
    texts = module.choose_texts(size + 3, seed=0)
    assert (sorted(texts[:size]), len(texts)) == (sorted(module.SENTENCES), size + 3)


def test_the_sentences_differ_in_kind_and_length() -> None:
    words = [len(sentence.split()) for sentence in module.SENTENCES]
    assert len(set(module.SENTENCES)) == len(module.SENTENCES) >= 40
    assert min(words) <= 4
    assert max(words) >= 30


def test_texts_are_those_asked_for() -> None:
    assert module.Texts.MIXED.choices() == module.SENTENCES
    assert not any(". " in text for text in module.Texts.ONE_SENTENCE.choices())
    paragraphs = module.Texts.PARAGRAPHS.choices()
    assert len(set(paragraphs)) == len(module.SENTENCES)
    assert all(len(text) in module.PARAGRAPH for text in paragraphs)
    settings = Settings("http://h:1", (module.Phase("all", 50, 1.0),), texts=module.Texts.PARAGRAPHS)
    assert {request.text for request in settings.schedule()} <= {*paragraphs}


def test_every_twenty_requests_of_mixed_traffic_hold_the_same_kinds() -> None:
    settings = Settings("http://h:1", (module.Phase("all", 50, 4.0),), profile=module.Profile.MIXED, seed=5)
    mixed = settings.schedule()
    assert mixed == settings.schedule()
    assert [each.planned_s for each in mixed] == [each.planned_s for each in replace(settings, seed=5).schedule()]
    for start in range(0, len(mixed) - 19, 20):
        assert Counter(each.kind for each in mixed[start : start + 20]) == module.MIX
    assert len({tuple(each.kind for each in mixed[start : start + 20]) for start in range(0, 100, 20)}) > 1
    for each in mixed:
        assert (
            len(each.text) in module.LONG
            if each.kind is module.RequestKind.LONG
            else len(each.text) <= module.PARAGRAPH.stop
        )
        assert each.frames is None


def test_a_long_text_has_a_length_of_its_own_where_lengths_are_planned() -> None:
    planned = module.plan_requests([0.1] * 40, seed=1, lengths=module.SpeechLengths(5.7, 0.35))
    mixed = module.mix(planned, seed=1)
    for before, after in zip(planned, mixed, strict=True):
        assert after.frames == (550 if after.kind is module.RequestKind.LONG else before.frames)
