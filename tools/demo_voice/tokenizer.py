"""Train the demo voice's tokenizer: byte-level BPE on its own texts, in files of the official layout."""

import json
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, trainers
from transformers import Qwen2Tokenizer

from talkray_tools.byte_tokenizer import byte_alphabet, tokenizer_config, write_tokenizer

_ROLE = "assistant"
_BYTES = 256
_JOINS = len(_ROLE) - 1  # maximum number of merges that turn the role into one token


def train_tokenizer(directory: Path, texts: Sequence[str], *, num_tokens: int, assistant_token: int) -> None:
    """Write vocab.json, merges.txt and tokenizer_config.json. Equal texts give equal files.

    `num_tokens` ids precede the added ids. "assistant" is always token `assistant_token`, because the
    prompt's role must have three tokens.
    """
    backend = _official_splitting()
    backend.model = models.BPE()
    trainer = trainers.BpeTrainer(vocab_size=num_tokens - _JOINS, initial_alphabet=byte_alphabet(), show_progress=False)
    backend.train_from_iterator(cased(texts, random.Random(0)), trainer)
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    merges += _role_merges([token.value for token in backend.model.tokenize(_ROLE)])
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "vocab.json", _vocabulary(merges, num_tokens, assistant_token))
    lines = "\n".join(f"{left} {right}" for left, right in merges)
    (directory / "merges.txt").write_text(f"#version: 0.2\n{lines}\n", encoding="utf-8")
    _write_json(directory / "tokenizer_config.json", tokenizer_config(num_tokens))


def cased(texts: Iterable[str], draw: random.Random) -> Iterator[str]:
    """Yield the texts as people type them: most unchanged, some in lower case, a few in capitals."""
    for text in texts:
        kind = draw.random()
        yield text if kind < 0.7 else text.lower() if kind < 0.95 else text.upper()


def _official_splitting() -> Tokenizer:
    """Return a tokenizer that splits text before BPE exactly as the official class does."""
    with tempfile.TemporaryDirectory() as scratch:
        write_tokenizer(Path(scratch), num_tokens=_BYTES + len(_ROLE), assistant_token=_BYTES + len(_ROLE) - 1)
        backend: Tokenizer = Qwen2Tokenizer.from_pretrained(scratch).backend_tokenizer
    state = json.loads(backend.to_str())
    state["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(state))


def _role_merges(pieces: list[str]) -> list[tuple[str, str]]:
    """Return merges that join the learned pieces of the role from the left. They come last and affect no other word."""
    starts = ["".join(pieces[:end]) for end in range(1, len(pieces))]
    return list(zip(starts, pieces[1:], strict=True))


def _vocabulary(merges: list[tuple[str, str]], num_tokens: int, assistant_token: int) -> dict[str, int]:
    """Return ids for bytes, then for merges in order, then unused ids; the role has its own id."""
    tokens = [*byte_alphabet(), *dict.fromkeys(left + right for left, right in merges)]
    tokens.remove(_ROLE)
    free = (number for number in range(num_tokens) if number != assistant_token)
    ids = dict(zip(tokens, free, strict=False))
    assert len(ids) == len(tokens), f"{len(tokens)} tokens do not fit {num_tokens} ids"
    unused = {f"<unused_{number}>": number for number in free}
    return ids | unused | {_ROLE: assistant_token}


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
