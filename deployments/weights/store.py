"""Resolves a model name to a checkpoint directory: a local folder, the Hugging Face Hub, or the embedded voice.

This module does not import torch, because the application uses it (`choice.py`). Importing the hub's library takes
half a second, so only functions that need the library import it.
"""

import difflib
import json
import os
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from deployments.embedded_voice.checkpoint import PACKED, place, unpacked
from deployments.errors import CheckpointError, StartError

T = TypeVar("T")

REPOSITORIES = {  # `auto` prefers earlier entries
    "1.7B-CustomVoice": "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
    "0.6B-CustomVoice": "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
    "1.7B-VoiceDesign": "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign",
    "1.7B-Base": "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
    "0.6B-Base": "Qwen/Qwen3-TTS-12Hz-0.6B-Base",
}
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_NEEDED = ("config.json", "vocab.json", "merges.txt", "speech_tokenizer/config.json")
_WEIGHTS = (".", "speech_tokenizer")
FAMILY = {"config.json": "qwen3_tts", "speech_tokenizer/config.json": "qwen3_tts_tokenizer_12hz"}  # model_type of each
ADAPTER = "adapter_config.json"
_DOWNLOAD = "deployments.weights.hub:download"  # needed once for each checkpoint from the hub

Report = Callable[[str], None]


def locate(model: str, *, report: Report | None = None) -> Path:
    """Return the directory of a complete checkpoint. `report` receives a line of download progress every two seconds.

    `model` is a directory, "embedded", "embedded-base", or a Hugging Face model ID such as
    "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice", which may be shortened to "1.7B-CustomVoice". A checkpoint that is not in
    the Hugging Face cache is downloaded. Raises CheckpointError, which lists what was tried and how to fix it.
    """
    if model in PACKED:
        return unpacked(model, cache_directory())
    directory = find(model)
    if directory is None:
        directory = check_complete(resolve_name(_DOWNLOAD)(repository(model), report or (lambda line: None)))
    return directory


def find(model: str) -> Path | None:
    """Return the result of `locate` without downloading or unpacking; None if either would be needed."""
    if model in PACKED:
        directory = place(model, cache_directory())
        return directory if directory.is_dir() else None
    directory = Path(model).expanduser()
    if directory.is_dir():
        return check_complete(directory)
    if model.startswith((".", "~", os.sep)) or model.count("/") > 1:  # a path
        raise CheckpointError(f"checkpoint directory {directory} does not exist")
    cached = _cached(repository(model))
    return check_complete(cached) if cached is not None and not missing_files(cached) else None


def find_config_directory(model: str) -> Path | None:
    """Return a folder with a checkpoint's small files, or None if the checkpoint is not on this machine."""
    try:
        return PACKED[model][-1] if model in PACKED else find(model)
    except CheckpointError:
        return None


def check_complete(directory: Path) -> Path:
    """Return `directory` after checking that it contains a complete Qwen3-TTS checkpoint.

    Raises CheckpointError, which names the missing files or the other model family.
    """
    if (directory / ADAPTER).is_file() and not (directory / "config.json").is_file():
        raise CheckpointError(unmerged(str(directory)))
    for name in FAMILY:
        if (directory / name).is_file():
            check_family(str(directory), name, directory / name)
    missing = missing_files(directory)
    if missing:
        raise CheckpointError(incomplete(str(directory), missing))
    return directory


def missing_files(directory: Path) -> list[str]:
    missing = missing_of(lambda name: (directory / name).is_file())
    return missing + [str(file.relative_to(directory)) for file in _shards(directory) if not file.is_file()]


def missing_of(has: Callable[[str], bool]) -> list[str]:
    missing = [name for name in _NEEDED if not has(name)]
    weights = [[str(Path(part) / name) for name in (SINGLE_FILE, INDEX_FILE)] for part in _WEIGHTS]
    return missing + [single for single, index in weights if not has(single) and not has(index)]


def _shards(directory: Path) -> list[Path]:
    """Return the shard files that the indices in `directory` list."""
    shards: set[Path] = set()
    for part in (directory / name for name in _WEIGHTS):
        if (part / INDEX_FILE).is_file() and not (part / SINGLE_FILE).is_file():
            shards |= {part / name for name in read_index(part / INDEX_FILE).values()}
    return sorted(shards)


def read_index(index: Path) -> dict[str, str]:
    """Return each tensor's file according to a shard index. Raises CheckpointError if the index is invalid."""
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors shards: {error!r}") from error


def read_json(file: Path) -> Any:
    """Return the content of a checkpoint's JSON file. Raises CheckpointError if the file is missing or invalid."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: is {file.parent} a Qwen3-TTS checkpoint directory?") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from None


def as_config(kind: type[T], values: object, source: Path) -> T:
    """Return decoded JSON as the dataclass `kind`, ignoring extra keys. Raises CheckpointError with each wrong key."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise CheckpointError(f"{source}: {'; '.join(problems)}") from None


def incomplete(checkpoint: str, missing: list[str]) -> str:
    return f"{checkpoint} is not a complete Qwen3-TTS checkpoint. Missing files: {', '.join(missing)}"


def unmerged(checkpoint: str) -> str:
    return f"{checkpoint} holds a LoRA adapter only: merge it into its base model first (PEFT: merge_and_unload)"


def check_family(checkpoint: str, name: str, file: Path) -> None:
    """Raise CheckpointError unless `file`, the file `name` of `checkpoint`, describes a supported model."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{name} of {checkpoint} is not JSON: {error}") from None
    family = config.get("model_type") if isinstance(config, dict) else None
    if family != FAMILY[name]:
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of another family: {name} has model_type {family!r}, but Talkray requires"
            f" Qwen3-TTS at 12 Hz ({FAMILY[name]!r})"
        )
    if "quantization_config" in config:
        raise CheckpointError(f"{checkpoint} is quantized ({name}): Talkray supports float32, float16 and bfloat16")


def repository(model: str) -> str:
    """Return the full Hugging Face ID of `model`. Raises CheckpointError if the name is unknown."""
    short = model.rsplit("/", 1)[-1].removeprefix("Qwen3-TTS-12Hz-")
    full_name = {name.lower(): full_name for name, full_name in REPOSITORIES.items()}.get(short.lower())
    if full_name is not None and model.removesuffix(short) in ("", "Qwen/", "Qwen/Qwen3-TTS-12Hz-", "Qwen3-TTS-12Hz-"):
        return full_name
    if "/" in model:
        return model
    raise CheckpointError(f"unknown model {model!r}{_hint(short)}")


def _hint(short: str) -> str:
    close = difflib.get_close_matches(short, REPOSITORIES, n=1, cutoff=0.5)
    meant = f", did you mean {close[0]!r}?" if close else "."
    return (
        f"{meant} Released: {', '.join(REPOSITORIES)}; or {' or '.join(map(repr, PACKED))}, a directory, or a Hugging"
        " Face name OWNER/NAME"
    )


def _cached(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except OSError:
        return None
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is not a Hugging Face name: {error}") from None


def cache_directory() -> Path:
    """Return TALKRAY_CACHE, or by default a folder in the user's cache. Raises StartError without a home folder."""
    named = os.environ.get("TALKRAY_CACHE")
    try:
        return Path(named) if named else Path.home() / ".cache" / "talkray"
    except RuntimeError:  # the container's UID may have no passwd entry
        raise StartError("this user has no home folder: set HOME, or name a folder in TALKRAY_CACHE") from None
