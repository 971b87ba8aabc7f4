import json
from dataclasses import fields
from pathlib import Path

import pytest

from deployments.talker.model.model_config import ControlTokens
from deployments.talker.text.tokenizer import TextTokenizer
from tools.demo_voice.dataset import written_ways
from tools.demo_voice.shape import SHAPE
from tools.demo_voice.tokenizer import train_tokenizer

TEXTS = [
    "The assistant assists the assessor.",
    "She sells sea shells by the sea shore, and the shells she sells are sea shells.",
    "How much wood would a woodchuck chuck, if a woodchuck could chuck wood?",
    "It's a long way to the shore; isn't it?",
] * 20


def train(directory: Path) -> TextTokenizer:
    train_tokenizer(directory, TEXTS, num_tokens=SHAPE.text_tokens, assistant_token=SHAPE.assistant_token)
    ids = {field.name: SHAPE.config[f"{field.name}_token_id"] for field in fields(ControlTokens)}
    return TextTokenizer(directory, ControlTokens(**ids))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> TextTokenizer:
    return train(directory)


def spelled(directory: Path, tokens: list[int]) -> list[str]:
    vocabulary = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    pieces = {number: piece for piece, number in vocabulary.items()}
    return [pieces[token] for token in tokens]


def test_the_role_is_three_tokens(tokenizer: TextTokenizer) -> None:
    assert tokenizer.role[1] == SHAPE.assistant_token
    assert tokenizer.role[2:] == tokenizer.encode_exact("\n")


def test_every_id_has_one_token(directory: Path, tokenizer: TextTokenizer) -> None:
    vocabulary = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    assert sorted(vocabulary.values()) == list(range(SHAPE.text_tokens))


def test_the_same_texts_give_the_same_files(directory: Path, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    train(tmp_path)
    for file in directory.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_frequent_words_are_few_tokens_and_unknown_characters_bytes(directory: Path, tokenizer: TextTokenizer) -> None:
    assert spelled(directory, tokenizer.encode("the sea shells")) == ["the", "Ġsea", "Ġshells"]
    assert spelled(directory, tokenizer.encode("日")) == ["æ", "Ĺ", "¥"]


def test_other_writings_spell_the_same_text(directory: Path, tokenizer: TextTokenizer) -> None:
    (ways,) = written_ways(TEXTS[:1], tokenizer, ways=12, seed=1)
    texts = {"".join(spelled(directory, way)).replace("Ġ", " ") for way in ways}
    assert {text.lower() for text in texts} == {TEXTS[0].lower()}
    assert len({tuple(way) for way in ways}) > len(texts)
