"""Choices for a model before it has replicas: which checkpoint `auto` means, and which models share a codec pool."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from deployments.embedded_voice.checkpoint import EMBEDDED, PACKED
from deployments.weights.store import INDEX_FILE, REPOSITORIES, SINGLE_FILE, find_config_directory, read_index

_PIECE = 1 << 20
_RELEASED = "12 Hz, released"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A concrete model, and the reason why it was selected."""

    model: str
    reason: str


def resolve_auto(model: str, *, models_dir: Path | None, gpu: bool) -> ResolvedModel:
    """Resolve `auto` to a concrete model. Any other name is returned unchanged."""
    if model != "auto":
        return ResolvedModel(model, "requested by name")
    if not gpu:
        return ResolvedModel(EMBEDDED, "no GPU here: the embedded checkpoint keeps up with real time on a CPU")
    from huggingface_hub import try_to_load_from_cache

    for name in REPOSITORIES.values():
        local = None if models_dir is None else models_dir / name.split("/")[1]
        if local is not None and (local / "config.json").exists():
            return ResolvedModel(str(local), f"found in {models_dir}")
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return ResolvedModel(name, "found in the Hugging Face cache")
    return ResolvedModel(
        EMBEDDED, "no released checkpoint in the Hugging Face cache: name one with --model to download it"
    )


def speech_tokenizer_key(model: str) -> str:
    """Return a value that is the same for all models with the same speech tokenizer, which can share a codec pool.

    All released models have the same tokenizer. Other models are compared by their files, or by their names if the
    files are not on this machine.
    """
    if model in REPOSITORIES.values() or model in REPOSITORIES:
        return _RELEASED
    if model in PACKED:
        return EMBEDDED
    directory = find_config_directory(model)
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
