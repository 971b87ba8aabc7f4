from collections import Counter

import pytest

from tools.demo_voice.manners import MANNERS, PLAIN
from tools.demo_voice.texts import MANNER_SHARE, MAX_CHARACTERS, NUM_HELD_OUT, lines

VOICES = ("one", "two")


def test_held_out_sentences_come_first_and_are_not_trained_on() -> None:
    result = lines(2, VOICES)
    first, rest = result[: NUM_HELD_OUT * len(VOICES)], result[NUM_HELD_OUT * len(VOICES) :]
    assert {line.split for line in first} == {"heldout"}
    assert {line.split for line in rest} == {"train"}
    assert not {line.text.lower() for line in first} & {line.text.lower() for line in rest}


def test_the_same_seed_gives_the_same_texts() -> None:
    assert lines(1, VOICES, seed=3) == lines(1, VOICES, seed=3) != lines(1, VOICES, seed=4)


def test_every_seed_holds_the_same_sentences_out() -> None:
    first, second = lines(2, VOICES, seed=3), lines(2, VOICES, seed=4)
    held_out = [line for line in first if line.split == "heldout"]
    assert held_out == [line for line in second if line.split == "heldout"]
    assert not {line.text for line in held_out} & {line.text for line in second if line.split == "train"}


def test_nearly_every_text_is_new() -> None:
    texts = [line.text for line in lines(20, VOICES) if line.split == "train" and len(line.text) > 20]
    assert len(set(texts)) > 0.95 * len(texts)
    assert max(map(len, texts)) <= MAX_CHARACTERS


def test_each_manner_has_its_share_and_held_out_lines_are_plain() -> None:
    result = lines(20, VOICES)
    assert {line.manner for line in result if line.split == "heldout"} == {PLAIN}
    manners = Counter(line.manner for line in result if line.split == "train")
    shares = {manner: manners[manner] / manners.total() for manner in MANNERS if manner != PLAIN}
    assert shares == pytest.approx(dict.fromkeys(shares, MANNER_SHARE / len(shares)), rel=0.1)
