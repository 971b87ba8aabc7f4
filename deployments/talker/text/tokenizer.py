"""Tokenizer that never converts user text to a control token."""

import json
import unicodedata
from pathlib import Path

from tokenizers import Encoding, Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from deployments.errors import CheckpointError
from deployments.talker.model.model_config import ControlTokens

# Pre-tokenization of Qwen2's tokenizer. Importing `transformers`, which contains the same rule, takes seconds.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_MOST_UNSPOKEN = 32
_MOST_AHEAD = 4  # number of texts
_MOST_COMPOSED = 3  # maximum ratio of a text's size in bytes to that of its NFC form
_PARTIAL = "\ufffd"  # decoded from part of a character whose remaining bytes are in another id


class TextTokenizer:
    """The checkpoint's byte-level BPE, minus added tokens. `<|im_end|>` or `<think>` in user text remains text."""

    def __init__(self, directory: Path, tokens: ControlTokens) -> None:
        self._bpe = _plain_tokenizer(directory)
        self._most_bytes = max(map(len, self._bpe.get_vocab()))  # in one token; its name has one character per byte
        self._ahead: dict[str, Encoding] = {}
        self._tokens = tokens
        self._newline = self.encode_exact("\n")
        self.role = [tokens.im_start, *self.encode_exact("assistant\n")]
        if len(self.role) != 3:
            raise CheckpointError(f"{directory}: the assistant role is {len(self.role)} tokens, the model expects 3")

    def encode_exact(self, text: str) -> list[int]:
        """Return the token ids of the unmodified `text`."""
        return self.encode_places(text)[0]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text body without its leading whitespace.

        A leading newline would merge with the newline after the role.
        """
        return self.encode_exact(text.lstrip())

    def encode_places(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of the unmodified `text`, and the number of characters before each token."""
        encoded = self._ahead.get(text) or self._bpe.encode(text)
        return encoded.ids, [start for start, _ in encoded.offsets]

    def encode_ahead(self, text: str) -> None:
        """Tokenize and cache a text that will be encoded soon. Releases the GIL, unlike `encode`."""
        [encoded] = self._bpe.encode_batch([text])
        while len(self._ahead) >= _MOST_AHEAD:
            self._ahead.pop(next(iter(self._ahead)))
        self._ahead[text] = encoded

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on a text's number of tokens, based on its length alone."""
        return len(text.encode("utf-8", "replace")) // (_MOST_COMPOSED * self._most_bytes)

    def encode_body(self, text: str, *, gap: str) -> tuple[list[int], list[int]]:
        """Return ids and places of a text body after `gap`, which joins the first word and counts as no characters."""
        ids, places = self.encode_places(gap + text.lstrip())
        return ids, [max(0, place - len(gap)) for place in places]

    def num_unspoken(self, ids: list[int]) -> int:
        """Return the number of trailing ids, at most _MOST_UNSPOKEN, that contain no part of a letter or digit."""
        num = 0
        for most in range(1, min(_MOST_UNSPOKEN, len(ids)) + 1):
            end: str = self._bpe.decode(ids[-most:])
            if any(char.isalnum() for char in end):
                break
            num = num if _PARTIAL in end else most
        return num

    def settled(self, text: str) -> int:
        """Return how many characters of `text`, in NFC, belong to words that later text cannot change.

        A word is complete once another word follows. Whitespace may join either side until both sides are known.
        """
        words = self._bpe.pre_tokenizer.pre_tokenize_str(text)
        last = len(text.rstrip())
        over = [end for _, (start, end) in words if end < (last if text[start:end].isspace() else len(text))]
        return max((end for end in over if not unicodedata.combining(text[end])), default=0)

    def encode_instructions(self, text: str) -> list[int]:
        """Return the token ids of the user turn that contains voice instructions."""
        body = [*self.encode_exact("user\n"), *self.encode(text)]
        return [self._tokens.im_start, *body, self._tokens.im_end, *self._newline]


class IncrementalTokenizer:
    """Incremental tokenizer for text that arrives in chunks. Together, the ids equal those of the complete text.

    Byte pairs are merged only within a word. A word's tokens are therefore known once another word follows.
    """

    def __init__(self, tokenizer: TextTokenizer, *, gap: str = "") -> None:
        """Start with empty text. See `TextTokenizer.encode_body` for `gap`."""
        self._tokenizer, self._gap = tokenizer, gap
        self._rest = ""  # text whose tokens depend on later text
        self._begun = False
        self._num_chars = -len(gap)
        # Characters before each id, excluding leading whitespace; the last entry counts all characters.
        self.starts: list[int] = []

    def feed(self, text: str, *, is_last: bool) -> list[int]:
        """Return the new ids that later text cannot change. For the last part, return all remaining ids."""
        self._rest = unicodedata.normalize("NFC", self._rest + text)
        if not self._begun:
            self._rest = self._rest.lstrip()
            self._begun = bool(self._rest)
            self._rest = self._gap * self._begun + self._rest
        end = len(self._rest) if is_last else self._tokenizer.settled(self._rest)
        settled, self._rest = self._rest[:end], self._rest[end:]
        ids, starts = self._tokenizer.encode_places(settled)
        self.starts += [max(0, self._num_chars + start) for start in starts]
        self._num_chars += len(settled)
        if is_last:
            self.starts.append(self._num_chars)
        return ids


def _plain_tokenizer(directory: Path) -> Tokenizer:
    for name in ("vocab.json", "merges.txt"):
        if not (directory / name).exists():
            raise CheckpointError(f"{directory / name} is missing: the tokenizer needs it")
    vocab = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    lines = (directory / "merges.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split(" ") for line in lines if line and not line.startswith("#version"))
    merges = [(left, right) for left, right in pairs]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.normalizer = NFC()
    words = Split(Regex(_WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
