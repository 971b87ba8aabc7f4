"""Text to token ids in which user text can never become a control token."""

import json
import unicodedata
from pathlib import Path

from tokenizers import Encoding, Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from deployments.errors import CheckpointError
from deployments.talker.model.model_config import ControlTokens

# How Qwen2's tokenizer cuts text before it merges bytes; `transformers`, which does the same, takes seconds to import.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_MOST_UNSPOKEN = 32
_MOST_AHEAD = 4  # texts
_MOST_COMPOSED = 3  # times the bytes of its NFC form that a text has
_PARTIAL = "\ufffd"  # of a character whose first bytes are in an id before


class TextTokenizer:
    """The checkpoint's byte-level BPE without any added token: `<|im_end|>` or `<think>` in user text stays text."""

    def __init__(self, directory: Path, tokens: ControlTokens) -> None:
        self._bpe = _plain_tokenizer(directory)
        self._most_bytes = max(map(len, self._bpe.get_vocab()))  # of a token: its name has a character for each byte
        self._ahead: dict[str, Encoding] = {}
        self._tokens = tokens
        self._newline = self.encode_exact("\n")
        self.role = [tokens.im_start, *self.encode_exact("assistant\n")]
        if len(self.role) != 3:
            raise CheckpointError(f"{directory}: the assistant role is {len(self.role)} tokens, the model expects 3")

    def encode_exact(self, text: str) -> list[int]:
        """Token ids of `text` as it is."""
        return self.encode_places(text)[0]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text body. Leading whitespace is removed, because a leading newline would merge into the
        role's.
        """
        return self.encode_exact(text.lstrip())

    def encode_places(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of `text` as it is, and how many of its characters precede each."""
        encoded = self._ahead.get(text) or self._bpe.encode(text)
        return encoded.ids, [start for start, _ in encoded.offsets]

    def encode_ahead(self, text: str) -> None:
        """Tokenize a text that is soon encoded as it is. Other threads run meanwhile: plain `encode` keeps the GIL."""
        [encoded] = self._bpe.encode_batch([text])
        while len(self._ahead) >= _MOST_AHEAD:
            self._ahead.pop(next(iter(self._ahead)))
        self._ahead[text] = encoded

    def least_tokens(self, text: str) -> int:
        """How many tokens a text has at least, by its length alone."""
        return len(text.encode("utf-8", "replace")) // (_MOST_COMPOSED * self._most_bytes)

    def encode_body(self, text: str, *, gap: str) -> tuple[list[int], list[int]]:
        """Tokens and places of a text body after a `gap`, which belongs to the first word and counts no character."""
        ids, places = self.encode_places(gap + text.lstrip())
        return ids, [max(0, place - len(gap)) for place in places]

    def num_unspoken(self, ids: list[int]) -> int:
        """How many ids at the end of a text hold no part of a letter or digit, of the last _MOST_UNSPOKEN."""
        num = 0
        for most in range(1, min(_MOST_UNSPOKEN, len(ids)) + 1):
            end: str = self._bpe.decode(ids[-most:])
            if any(char.isalnum() for char in end):
                break
            num = num if _PARTIAL in end else most
        return num

    def settled(self, text: str) -> int:
        """How many characters of `text`, in NFC, are in words that end as they do whatever follows `text`.

        A word is over once something else follows; whitespace may go to either side until the other side is there.
        """
        words = self._bpe.pre_tokenizer.pre_tokenize_str(text)
        last = len(text.rstrip())
        over = [end for _, (start, end) in words if end < (last if text[start:end].isspace() else len(text))]
        return max((end for end in over if not unicodedata.combining(text[end])), default=0)

    def encode_instructions(self, text: str) -> list[int]:
        """The user turn that carries voice instructions."""
        body = [*self.encode_exact("user\n"), *self.encode(text)]
        return [self._tokens.im_start, *body, self._tokens.im_end, *self._newline]


class LiveTokens:
    """Token ids of a text that arrives in parts, cut anywhere: together they equal the token ids of the whole text.

    Byte pairs are merged within a word. So a word's tokens are known once the next character is not part of it.
    """

    def __init__(self, tokenizer: TextTokenizer, *, gap: str = "") -> None:
        """`gap`: see `TextTokenizer.encode_body`."""
        self._tokenizer, self._gap = tokenizer, gap
        self._rest = ""  # whose tokens depend on later text
        self._begun = False
        self._num_chars = -len(gap)
        # Characters before each id so far, without leading whitespace of the text; the last one counts the whole text.
        self.starts: list[int] = []

    def feed(self, text: str, *, is_last: bool) -> list[int]:
        """Returns the ids that are certain with `text`, none twice; with the last part all that are left."""
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
