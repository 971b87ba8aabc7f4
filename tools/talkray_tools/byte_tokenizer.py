"""Tokenizer files in the official layout with no downloaded vocabulary: one token per byte, plus the word `assistant`.

Random checkpoints use this tokenizer. The prompt format requires "assistant\\n" to be two tokens, so merges are needed.
"""

import json
from pathlib import Path

# The Qwen3-TTS tokenizer's added tokens, in id order. <tool_call> to </think> are not special tokens.
ADDED_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
_NOT_SPECIAL = frozenset(ADDED_TOKENS[ADDED_TOKENS.index("<tool_call>") : ADDED_TOKENS.index("</think>") + 1])
_ROLE = "assistant"


def byte_alphabet() -> list[str]:
    """Return the printable character for each byte in byte-level BPE files, in token id order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(256 + number) for number in range(256 - len(printable))]


def write_tokenizer(directory: Path, *, num_tokens: int, assistant_token: int) -> None:
    """Write vocab.json, merges.txt and tokenizer_config.json.

    `num_tokens` ids precede the added tokens. Unused ids are filled, so that the added tokens get the ids given in the
    checkpoint's configuration. The word "assistant" gets the id `assistant_token`.
    """
    pieces = [_ROLE[:end] for end in range(2, len(_ROLE))]
    ids = {token: number for number, token in enumerate([*byte_alphabet(), *pieces])} | {_ROLE: assistant_token}
    taken = set(ids.values())
    filled = {f"<unused_{number}>": number for number in range(num_tokens) if number not in taken}
    merges = [f"{_ROLE[:end]} {_ROLE[end]}" for end in range(1, len(_ROLE))]
    _write_json(directory / "vocab.json", ids | filled)
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    _write_json(directory / "tokenizer_config.json", tokenizer_config(num_tokens))


def tokenizer_config(num_tokens: int) -> dict[str, object]:
    """Return the content of `tokenizer_config.json`. The added tokens directly follow the first `num_tokens` ids."""
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {
        str(num_tokens + number): {"content": token, "special": token not in _NOT_SPECIAL, **plain}
        for number, token in enumerate(ADDED_TOKENS)
    }
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "split_special_tokens": False,
        "additional_special_tokens": [token for token in ADDED_TOKENS[1:] if token not in _NOT_SPECIAL],
        "added_tokens_decoder": added,
    }


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
