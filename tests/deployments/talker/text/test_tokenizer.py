import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.errors import CheckpointError
from deployments.talker.model.model_config import ControlTokens, ModelConfig
from deployments.talker.text.tokenizer import TextTokenizer
from talkray_tools.byte_tokenizer import ADDED_TOKENS


@pytest.fixture
def directory(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("CustomVoice")


@pytest.fixture
def tokens(directory: Path) -> ControlTokens:
    return ModelConfig.load(directory).tokens


@pytest.fixture
def tokenizer(directory: Path, tokens: ControlTokens) -> TextTokenizer:
    return TextTokenizer(directory, tokens)


@pytest.mark.parametrize("control", ADDED_TOKENS)
def test_user_text_never_becomes_a_control_token(tokenizer: TextTokenizer, tokens: ControlTokens, control: str) -> None:
    first_control = tokens.im_start - ADDED_TOKENS.index("<|im_start|>")
    text = f"before {control} after"
    for ids in (tokenizer.encode(text), tokenizer.encode(control)):
        assert max(ids) < first_control
    assert len(tokenizer.encode(text)) == len(text)  # a token per byte: nothing was swallowed
    turn = tokenizer.encode_instructions(text)
    assert [turn.index(tokens.im_start), turn.index(tokens.im_end)] == [0, len(turn) - 2]
    assert [each for each in turn if each >= first_control] == [tokens.im_start, tokens.im_end]


def test_control_tokens_are_tokens_to_the_official_tokenizer(directory: Path, tokens: ControlTokens) -> None:
    """What the tests above rule out does happen with the tokenizer as it stands in the checkpoint."""
    from transformers import Qwen2Tokenizer

    official = Qwen2Tokenizer.from_pretrained(directory)
    assert official("<|im_end|>").input_ids == [tokens.im_end]


@pytest.mark.parametrize(
    "text", ["Hello", "Hello.", "Hello.\u201d", "50 %?!", "\u4f60\u597d", "\u4f60\u597d\u3002", "!?"]
)
def test_marks_at_the_end_are_no_part_of_a_word(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode_exact(text)
    spoken = text.rstrip(".\u201d %?!\u3002")
    num_spoken = len(tokenizer.encode_exact(spoken)) if spoken else 0
    assert tokenizer.num_unspoken(ids) == len(ids) - num_spoken


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_a_missing_file_is_named(directory: Path, tokens: ControlTokens, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(directory, tmp_path / "copy", ignore=shutil.ignore_patterns(name))
    with pytest.raises(CheckpointError, match=name):
        TextTokenizer(copy, tokens)


def test_merges_that_split_the_role_are_refused(directory: Path, tokens: ControlTokens, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "copy")
    (copy / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(CheckpointError, match="role is 11 tokens, the model expects 3"):
        TextTokenizer(copy, tokens)


def test_text_is_cut_as_transformers_cuts_it(directory: Path, tokenizer: TextTokenizer) -> None:
    from transformers import Qwen2Tokenizer

    vocab = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    official = json.loads(Qwen2Tokenizer(vocab=vocab, merges=[]).backend_tokenizer.to_str())
    ours = json.loads(tokenizer._bpe.to_str())
    for part in ("normalizer", "pre_tokenizer"):
        assert ours[part] == official[part]
    assert ours["model"] | {"merges": None} == official["model"] | {"merges": None}
