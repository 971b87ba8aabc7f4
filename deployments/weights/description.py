"""Describes a checkpoint from its small files, without torch, also for a model without replicas."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.config import TalkerConfig
from deployments.embedded_voice.checkpoint import EMBEDDED, PACKED
from deployments.errors import CheckpointError
from deployments.protocol import ModelInfo, ModelKind
from deployments.weights.store import (
    INDEX_FILE,
    REPOSITORIES,
    SINGLE_FILE,
    as_config,
    found,
    read_index,
    read_json,
)

_PIECE = 1 << 20
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16  # of a file that represent all of it
_ROWS_A_CHAR = 1.5  # in the prompt and as frames: a slow voice says twelve characters in a second
_RELEASED = "12 Hz, released"
# Next to a checkpoint: facts that Talkray has found out about it. It takes precedence over the section `talkray` of
# config.json.
OWN_FACTS = "talkray.json"


@dataclass(frozen=True, slots=True)
class TextNeeds:
    """The form that text needs before the checkpoint can speak it: Talkray's own addition to `config.json`."""

    spoken_form: Literal["english"] | None = None  # normalised to spoken words
    follows_instructions: Annotated[bool, Field(strict=True)] = False  # with a spoken form
    max_segment_chars: Annotated[int, Field(ge=1, strict=True)] = 1000
    alignment_head: tuple[int, int] | None = None  # layer and head of the talker whose attention follows the text
    clones_by_vector: Annotated[bool, Field(strict=True)] = False  # its codec has no encoder


def describe(model: str, config: TalkerConfig, *, on_gpu: bool) -> ModelInfo | None:
    """The facts of a checkpoint as its talkers would report them, except for the precision in which a GPU decodes.

    None if the checkpoint is not on this machine. Raises CheckpointError.
    """
    directory = found(model)
    return None if directory is None else described(directory, model, config, on_gpu=on_gpu)


def described(directory: Path, name: str, config: TalkerConfig, *, on_gpu: bool) -> ModelInfo:
    """The same for a checkpoint directory, under the given `name`. Raises CheckpointError."""
    top, codec = read_json(directory / "config.json"), read_json(directory / "speech_tokenizer" / "config.json")
    needs = as_config(TextNeeds, own_facts(directory, top), directory / "config.json")
    try:
        info = _info(top, codec, needs, config, on_gpu=on_gpu)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{directory}: its config.json files do not describe Qwen3-TTS: {error!r}") from None
    fingerprint = cloning_fingerprint(directory) if info.kind is ModelKind.BASE else ""
    return replace(info, name=name, fingerprint=fingerprint)


def own_facts(directory: Path, top: Mapping[str, Any]) -> dict[str, Any]:
    """Talkray's own section of a checkpoint whose config.json holds `top`. Raises CheckpointError."""
    file = directory / OWN_FACTS
    return {**(top.get("talkray") or {}), **(read_json(file) if file.exists() else {})}


def cloning_fingerprint(directory: Path) -> str:
    """A hash of the files that make a clone prompt of a recording. Blocks of each file represent all of it."""
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
    # The official package takes no instructions for clones, and drops those for the small CustomVoice model. A voice
    # that needs a spoken form only reads, unless its files say otherwise.
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
    """The voices that a checkpoint names, in lower case; None if it is not on this machine (yet)."""
    directory = found(model)
    if directory is None:
        return None
    return _names((read_json(directory / "config.json").get("talker_config") or {}).get("spk_id"))


def clones(model: str) -> bool:
    """Whether it speaks with the voice of a recording; judged by its name if its files are not here."""
    directory = found(model)
    if directory is None:
        return model.lower().endswith("-base")
    return bool(read_json(directory / "config.json").get("tts_model_type") == ModelKind.BASE)


def encodes(directory: Path) -> bool:
    """Whether the checkpoint in `directory` clones, and its codec makes codes of the recording."""
    config = read_json(directory / "config.json")
    return config["tts_model_type"] == ModelKind.BASE and not own_facts(directory, config).get("clones_by_vector")


def tokenizer_of(model: str) -> str:
    """Equal for models with the same speech tokenizer, whose codes one codec pool decodes.

    The released models have the same. For others the files decide if they are here, else the name.
    """
    if model in REPOSITORIES.values() or model in REPOSITORIES:
        return _RELEASED
    if model in PACKED:
        return EMBEDDED
    directory = found(model)
    if directory is None:
        return model
    folder = directory / "speech_tokenizer"
    weights = [folder / SINGLE_FILE]
    if not weights[0].is_file():
        weights = [folder / name for name in sorted(set(read_index(folder / INDEX_FILE).values()))]
    digest = hashlib.sha256()
    for file in (folder / "config.json", *weights):
        with file.open("rb") as content:
            while piece := content.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()
