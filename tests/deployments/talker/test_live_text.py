"""Text that is written while it is spoken: what comes of it is what comes of the same text sent at once."""

import json
import math
import random
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deployments.errors import InvalidRequest
from deployments.protocol import Codes, FinishReason, FrameChunk, Mailbox, Reference, SynthesisRequest
from deployments.talker.engine import output_queue
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from deployments.talker.state.sequence import TextProgress
from deployments.talker.text.tokenizer import IncrementalTokenizer, TextTokenizer
from tests.deployments.talker.conftest import CONFIG
from tests.deployments.talker.driving import Spoken, ask, chunks_of, resumed, speak
from tests.deployments.talker.engine.test_engine import push_end_of_speech

TEXT = "It's e\u0301crit, na 語🙂:\n\n  12  in... Isn't"
MAILBOX = Mailbox("127.0.0.1", 1, "token")
Chunks = list[tuple[int, FrameChunk]]


def at_once(text: str = TEXT, **changes: object) -> SynthesisRequest:
    return ask(text, **{"frames": 55, "non_streaming_mode": False, "ignore_eos": True, **changes})  # type: ignore[arg-type]


def live(request: SynthesisRequest) -> SynthesisRequest:
    return replace(request, text="", mailbox=MAILBOX, non_streaming_mode=None)


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = [*sorted(places), len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def random_cuts(seed: int, text: str = TEXT) -> list[str]:
    draw = random.Random(seed)
    return cut(text, [draw.randrange(len(text)) for _ in range(draw.randrange(1, 30))])


def run_dry(engine: Engine) -> Chunks:
    chunks: Chunks = []
    while not engine.is_idle:
        output = engine.step()
        assert not output.failures
        chunks += output.chunks
    engine.check_integrity()
    return chunks


def written(engine: Engine, parts: Sequence[str], request: SynthesisRequest) -> list[FrameChunk]:
    """What comes when each part is sent only once the one before it has been used up."""
    engine.add(0, live(request))
    chunks = run_dry(engine)
    for part in parts:
        engine.append_text(0, part, is_last=False)
        chunks += run_dry(engine)
    engine.append_text(0, "", is_last=True)
    return [chunk for _, chunk in chunks + run_dry(engine)]


def write(engine: Engine, parts: Sequence[str], request: SynthesisRequest) -> Spoken:
    return Spoken.join(written(engine, parts, request))


def same(one: Spoken, other: Spoken) -> bool:
    facts = (one.reason, one.num_text_tokens) == (other.reason, other.num_text_tokens)
    return facts and np.array_equal(one.codes, other.codes)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Callable[[str], Path], engine_of: Callable[[str], Engine]) -> TextTokenizer:
    return engine_of("CustomVoice").prompts.tokenizer


@pytest.fixture(scope="module")
def whole(engine_of: Callable[[str], Engine]) -> Spoken:
    spoken = speak(engine_of("CustomVoice"), at_once())
    assert len(spoken.codes) == 55 > spoken.num_text_tokens
    return spoken


@pytest.mark.parametrize("seed", range(50))
def test_tokens_of_parts_are_those_of_the_whole_text(tokenizer: TextTokenizer, seed: int) -> None:
    tokens, ids = IncrementalTokenizer(tokenizer), []
    for part in random_cuts(seed, "  " + TEXT + " \n "):
        ids += tokens.feed(part, is_last=False)
    ids += tokens.feed("", is_last=True)
    assert ids == tokenizer.encode("  " + TEXT + " \n ")


@pytest.mark.parametrize(("text", "settled"), [
    ("Hi", 0), ("Hi there", 2), ("Hi \n", 2), ("Hi \n ", 2), ("Hi \n \n  ", 2), ("Hi \n b", 4), ("Hi  b", 3),
])  # fmt: skip
def test_whitespace_joins_either_side_until_both_are_known(tokenizer: TextTokenizer, text: str, settled: int) -> None:
    assert tokenizer.settled(text) == settled


@pytest.mark.parametrize("parts", [list(TEXT), [TEXT], *(random_cuts(seed) for seed in range(3))])
def test_codes_are_those_of_the_same_text_sent_at_once(engine: Engine, whole: Spoken, parts: list[str]) -> None:
    assert same(write(engine, parts, at_once()), whole)


def test_codes_are_equal_beside_others_that_come_and_go(engine: Engine, whole: Spoken) -> None:
    engine.add(0, live(at_once()))
    chunks: Chunks = []
    for number, part in enumerate(random_cuts(7), start=1):
        engine.append_text(0, part, is_last=False)
        engine.add(number, ask(f"Somebody else, {number}.", frames=3 + number % 5, seed=number))
        for _ in range(3):
            chunks += engine.step().chunks
    engine.append_text(0, "", is_last=True)
    chunks += run_dry(engine)
    assert same(Spoken.join([chunk for number, chunk in chunks if number == 0]), whole)


@pytest.mark.parametrize("place", [1, 17, 40])
def test_another_talker_reads_the_text_again_and_goes_on(engine: Engine, whole: Spoken, place: int) -> None:
    rest = write(engine, random_cuts(3), resumed(at_once(), whole.codes[:place]))
    assert np.array_equal(rest.codes, whole.codes[place:])
    assert rest.reason is whole.reason


def test_nothing_is_left_to_do_while_the_writer_pauses(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_queue, "_HOLDING_LEAD_S", -math.inf)  # as on a GPU, hold whatever can be held
    monkeypatch.setattr(engine.output_queue, "max_held", 8)
    engine.add(0, live(at_once()))
    assert engine.is_idle
    engine.append_text(0, "Hello", is_last=False)
    assert engine.is_idle
    engine.append_text(0, " there you", is_last=False)
    frames = sum(len(chunk.codes) for _, chunk in run_dry(engine))
    assert frames == len(engine.prompts.tokenizer.encode("Hello there")) - 1  # one token a frame, after the first
    engine.abort(0)
    assert engine.step().chunks == ()


def test_the_prompt_is_prefilled_before_the_first_frame_has_its_text(engine: Engine) -> None:
    engine.add(0, live(at_once()))
    engine.append_text(0, "a ", is_last=False)
    assert not engine.is_idle
    assert engine.step().chunks == ()
    assert [sequence.prompt.num_text_tokens for sequence in engine.scheduler.running.values()] == [1]
    assert engine.is_idle
    engine.append_text(0, "- ", is_last=False)
    [sequence] = engine.scheduler.running.values()
    assert sum(len(chunk.codes) for _, chunk in run_dry(engine)) == sequence.prompt.num_text_tokens - 1
    engine.abort(0)


def test_a_sequence_without_text_makes_room_for_others(tiny_checkpoint: Callable[[str], Path], whole: Spoken) -> None:
    engine = build_engine(tiny_checkpoint("CustomVoice"), CONFIG.model_copy(update={"max_num_seqs": 1}))
    alone = speak(engine, at_once())
    engine.add(0, live(at_once()))
    engine.append_text(0, TEXT[:20], is_last=False)
    chunks = run_dry(engine)
    other = ask("Somebody else.", frames=8, ignore_eos=True)
    engine.add(1, other)
    others = run_dry(engine)
    assert {number for number, _ in others} == {1}
    assert list(engine.scheduler.running) == [0]  # it is back before there is text
    engine.append_text(0, TEXT[20:], is_last=True)
    chunks += run_dry(engine)
    assert same(Spoken.join([chunk for _, chunk in chunks]), alone)


def test_a_clone_waits_for_the_text_that_stands_beside_its_recording(engine_of: Callable[[str], Engine]) -> None:
    engine, draw = engine_of("Base"), np.random.default_rng(1)
    codes: Codes = draw.integers(0, 2048, (6, 16)).astype(np.int16)
    reference = Reference(draw.standard_normal(12_000).astype(np.float32) * 0.1, "ab")
    request = replace(at_once(voice=None, reference=reference), reference_codes=codes)
    assert same(write(engine, list(TEXT), request), speak(engine, request))


def test_the_limit_grows_with_the_text(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = at_once("Hello there.", frames=2000, ignore_eos=False)
    push_end_of_speech(monkeypatch, -1e9)
    engine.add(0, live(request))
    engine.append_text(0, "Hello the", is_last=False)
    run_dry(engine)
    [sequence] = engine.scheduler.running.values()
    assert sequence.limit.reason is FinishReason.LENGTH
    engine.append_text(0, "re.", is_last=True)
    expected = engine.limits.frame_limit(request, sequence.sampling, engine.prompts.build(request))
    assert sequence.limit == expected
    assert expected.reason is FinishReason.RUNAWAY
    engine.abort(0)


def test_text_that_never_comes_is_told_like_none_at_all(engine: Engine) -> None:
    engine.add(0, live(at_once()))
    engine.append_text(0, "  ", is_last=False)
    with pytest.raises(InvalidRequest) as raised:
        engine.append_text(0, "", is_last=True)
    assert raised.value.code == "empty_input"
    engine.append_text(0, "too late", is_last=True)
    assert engine.is_idle


def follow(engine: Engine, request: SynthesisRequest, parts: Sequence[str] | None = None) -> list[tuple[int, float]]:
    """Frames and how far in the text each is."""
    wanted = replace(request, word_times=True)
    chunks = chunks_of(engine, wanted) if parts is None else written(engine, parts, wanted)
    readings = [reading for chunk in chunks for reading in chunk.readings]
    return [(each.first + number, chars) for each in readings for number, chars in enumerate(each.chars)]


@pytest.fixture(scope="module")
def following(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A checkpoint that names a head; what it attends to is random, of course."""
    directory = tmp_path_factory.mktemp("following") / "checkpoint"
    shutil.copytree(tiny_checkpoint("CustomVoice"), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "talkray": {"alignment_head": [1, 1]}}))
    return build_engine(directory, CONFIG)


@pytest.mark.parametrize("by", ["head", "estimate"])
def test_readings_go_with_the_frames_and_change_none(by: str, following: Engine, engine: Engine, whole: Spoken) -> None:
    speaker = following if by == "head" else engine
    readings = follow(speaker, at_once())
    assert [number for number, _ in readings] == list(range(len(whole.codes)))
    chars = [chars for _, chars in readings]
    assert chars == sorted(chars)
    assert 0 < chars[-1] <= len(TEXT)
    assert same(speak(speaker, at_once()), whole)


def test_readings_of_a_text_that_is_written_are_those_of_the_whole(following: Engine) -> None:
    text = unicodedata.normalize("NFC", TEXT)  # as the ingress sends it
    request = at_once(text, frames=len(text) // 2)
    assert np.allclose(follow(following, request, random_cuts(5, text)), follow(following, request))


def test_readings_beside_a_prompt_with_all_text(following: Engine) -> None:
    readings = follow(following, ask(TEXT, frames=10, ignore_eos=True))
    assert len(readings) == 10
    assert readings[-1][1] > 0


def test_a_frame_is_placed_by_what_was_read_before_it(following: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noted(name: str, method: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: (order.append(name), method(*args))[1]

    for name in ("read", "add_frame"):
        monkeypatch.setattr(TextProgress, name, noted(name, getattr(TextProgress, name)))
    speak(following, ask(frames=4, ignore_eos=True))
    assert order == ["add_frame", *["read", "add_frame"] * 3]


@pytest.mark.parametrize("text", ["Hello?!", "Hello there. " * 9 + "Hello?!"])
def test_marks_at_the_end_are_found_in_any_text(following: Engine, text: str) -> None:
    sequence = following.input_processor.build_sequence(0, ask(text))
    assert sequence is not None
    following.add(1, live(at_once()))
    following.append_text(1, text, is_last=True)
    written = following.scheduler.find(1)
    assert written is not None
    assert sequence.progress.num_unspoken == written.progress.num_unspoken == 2
    following.abort(1)


def test_estimates_learn_from_speech(tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(tiny_checkpoint("CustomVoice"), CONFIG)
    before = follow(engine, at_once(frames=6))
    push_end_of_speech(monkeypatch, 1e4)
    for _ in range(40):
        speak(engine, at_once(frames=6, ignore_eos=False))  # over at once: far faster than assumed
    monkeypatch.undo()
    after = follow(engine, at_once(frames=6))
    assert after[-1][1] > 1.5 * before[-1][1] > 0
