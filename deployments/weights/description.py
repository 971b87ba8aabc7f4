"""Description of a checkpoint based on its small files. Requires neither torch nor running replicas."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.config import TalkerConfig
from deployments.errors import CheckpointError
from deployments.protocol import ModelInfo, ModelKind
from deployments.weights.store import (
    as_config,
    find_config_directory,
    read_json,
)

_BLOCKS, _BLOCK_BYTES = 64, 1 << 16  # blocks per file that the fingerprint hashes
_ROWS_A_CHAR = 1.5  # in the prompt and as frames; a slow voice speaks twelve characters per second
# File next to a checkpoint that holds facts determined by Talkray. Its values override those in the `talkray` section
# of config.json.
OWN_FACTS = "talkray.json"


@dataclass(frozen=True, slots=True)
class TextNeeds:
    """How a checkpoint needs its text prepared: Talkray's own section of `config.json`."""

    spoken_form: Literal["english"] | None = None  # language whose rules normalize text to spoken words
    follows_instructions: Annotated[bool, Field(strict=True)] = False  # applies to voices with a spoken form
    max_segment_chars: Annotated[int, Field(ge=1, strict=True)] = 1000
    alignment_head: tuple[int, int] | None = None  # layer and head of the talker whose attention follows the text
    clones_by_vector: Annotated[bool, Field(strict=True)] = False  # for checkpoints whose codec lacks an encoder


def describe(model: str, config: TalkerConfig, *, on_gpu: bool) -> ModelInfo | None:
    """Return the facts that a checkpoint's talkers would report, except for a GPU's decoding precision.

    Returns None if the checkpoint is not on this machine. Raises CheckpointError if its files are invalid.
    """
    directory = find_config_directory(model)
    return None if directory is None else describe_directory(directory, model, config, on_gpu=on_gpu)


def describe_directory(directory: Path, name: str, config: TalkerConfig, *, on_gpu: bool) -> ModelInfo:
    """Return the facts about the checkpoint in `directory`, named `name`. Raises CheckpointError if it is invalid."""
    top, codec = read_json(directory / "config.json"), read_json(directory / "speech_tokenizer" / "config.json")
    needs = as_config(TextNeeds, own_facts(directory, top), directory / "config.json")
    try:
        info = _info(top, codec, needs, config, on_gpu=on_gpu)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{directory}: its config.json files do not describe Qwen3-TTS: {error!r}") from None
    fingerprint = cloning_fingerprint(directory) if info.kind is ModelKind.BASE else ""
    return replace(info, name=name, fingerprint=fingerprint)


def own_facts(directory: Path, top: Mapping[str, Any]) -> dict[str, Any]:
    """Return Talkray's own section for a checkpoint whose config.json contains `top`. Raises CheckpointError."""
    file = directory / OWN_FACTS
    return {**(top.get("talkray") or {}), **(read_json(file) if file.exists() else {})}


def cloning_fingerprint(directory: Path) -> str:
    """Return a hash of the files that determine clone prompts. Only some blocks of each file are hashed."""
    digest = hashlib.sha256()
    for folder in (directory, directory / "speech_tokenizer"):
        digest.update((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(str(size).encode())
            with path.open("rb") as file:
                for number in range(_BLOCKS):
                    file.seek(number * max(0, size - _BLOCK_BYTES) // _BLOCKS)
                    digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:32]


def _info(top: Any, codec: Any, needs: TextNeeds, config: TalkerConfig, *, on_gpu: bool) -> ModelInfo:
    kind = ModelKind(top["tts_model_type"])
    talker = top["talker_config"]
    # The official package ignores instructions for clones and for the small CustomVoice model. A voice with a spoken
    # form accepts instructions only if its files set `follows_instructions`.
    is_small = kind is ModelKind.CUSTOM_VOICE and top.get("tts_model_size") == "0b6"
    only_reads = needs.spoken_form is not None and not needs.follows_instructions
    return ModelInfo(
        name="",
        kind=kind,
        voices=_names(talker.get("spk_id")),
        languages=tuple(each for each in _names(talker.get("codec_language_id")) if not each.endswith("_dialect")),
        supports_instructions=not (kind is ModelKind.BASE or is_small or only_reads),
        sample_rate=codec["output_sample_rate"],
        frame_samples=codec["decode_upsample_rate"],
        num_code_groups=talker["num_code_groups"],
        talker_on_gpu=on_gpu,
        deterministic=config.deterministic or not (on_gpu or config.kernels == "plain"),
        spoken_form=needs.spoken_form,
        max_segment_chars=min(needs.max_segment_chars, int(config.max_model_len / _ROWS_A_CHAR)),
        word_times=needs.alignment_head is not None,
        clones_by_vector=needs.clones_by_vector,
    )


def _names(table: Mapping[str, object] | None) -> tuple[str, ...]:
    return tuple(name.lower() for name, value in (table or {}).items() if value is not None and value is not False)


def speakers(model: str) -> tuple[str, ...] | None:
    """Return a checkpoint's voices in lower case; None if the checkpoint is not on this machine."""
    directory = find_config_directory(model)
    if directory is None:
        return None
    return _names((read_json(directory / "config.json").get("talker_config") or {}).get("spk_id"))


def clones(model: str) -> bool:
    """Return whether the model clones voices, judging by its name if the checkpoint is not on this machine."""
    directory = find_config_directory(model)
    if directory is None:
        return model.lower().endswith("-base")
    return bool(read_json(directory / "config.json").get("tts_model_type") == ModelKind.BASE)


def encodes(directory: Path) -> bool:
    """Return whether the checkpoint in `directory` clones voices and has a codec that encodes recordings."""
    config = read_json(directory / "config.json")
    return config["tts_model_type"] == ModelKind.BASE and not own_facts(directory, config).get("clones_by_vector")
