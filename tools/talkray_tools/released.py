"""Configuration files of the released checkpoints, and the model shapes that tests and tools derive from them.

`released_configs` contains the files of the official repositories, with identical files stored once. In all of them,
added token ids follow the text tokenizer's ids, and control ids follow the codes.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Json = dict[str, Any]

_FOLDER = Path(__file__).parent / "released_configs"
_NAMES = ("0.6B-Base", "0.6B-CustomVoice", "1.7B-Base", "1.7B-CustomVoice", "1.7B-VoiceDesign")


def read(name: str) -> Json:
    value: Json = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return value


GENERATION = read("generation")
PREPROCESSOR = read("preprocessor")
AUDIO_PREPROCESSOR = read("speech_tokenizer_preprocessor")


def changed(config: Json, changes: Json) -> Json:
    """Return `config` with the keys of `changes`. Sections (`..._config`) that `config` has are merged key by key."""
    sections = {key: changed(config[key], value) for key, value in changes.items() if key in config and _section(key)}
    return config | {key: value for key, value in changes.items() if not _section(key)} | sections


def _section(key: str) -> bool:
    return key.endswith("_config")


@dataclass(frozen=True, slots=True)
class Shape:
    """Differences between checkpoints of the same architecture, other than their tensors."""

    config: Json  # config.json
    codec: Json  # speech_tokenizer/config.json
    unit_scale: bool = False  # for random weights: use deviations that keep signals near 1 in narrow layers
    eos_scale: float = 1.0  # for random weights: scales the codec head's end-of-speech row

    @property
    def text_tokens(self) -> int:
        """Number of the tokenizer's own tokens. The ids of <|endoftext|> and <|im_start|> directly follow."""
        return int(self.config["im_start_token_id"]) - 1

    @property
    def assistant_token(self) -> int:
        """Token id for the word "assistant"."""
        return int(self.config["assistant_token_id"])

    def changed(self, changes: Json) -> "Shape":
        """Return the shape with `changes` applied to its config.json."""
        return replace(self, config=changed(self.config, changes))

    def with_official_text(self) -> "Shape":
        """Return the same model with the released tokenizer."""
        official = SHAPES["1.7B-Base"].config
        ids = {key: value for key, value in official.items() if key.endswith("_token_id")}
        return self.changed({**ids, "talker_config": {"text_vocab_size": official["talker_config"]["text_vocab_size"]}})


def _shapes() -> dict[str, Shape]:
    """Return the released checkpoints by name, and a tiny checkpoint of each kind."""
    codec = read("speech_tokenizer")
    shapes = {name: Shape(read(name), codec) for name in _NAMES}
    tiny_codec = changed(codec, read("tiny_speech_tokenizer"))
    for kind in ("Base", "CustomVoice", "VoiceDesign"):
        # Derive from the large models, because the small models do not support instructions.
        config = changed(shapes[f"1.7B-{kind}"].config, read("tiny"))
        shapes[f"tiny-{kind}"] = Shape(config, tiny_codec, unit_scale=True, eos_scale=3.0)
    return shapes


SHAPES = _shapes()
