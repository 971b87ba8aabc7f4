"""From the name of a model to a local checkpoint directory."""

import difflib
import os
from pathlib import Path

from deployments.checkpoint import INDEX_FILE, SINGLE_FILE
from deployments.embedded import embedded_path
from deployments.errors import CheckpointError
from deployments.released import REPOSITORIES

EMBEDDED = "embedded"
_NEEDED = ("config.json", "vocab.json", "merges.txt", "speech_tokenizer/config.json")
_WEIGHTS = (".", "speech_tokenizer")


def locate(model: str, *, revision: str | None = None) -> Path:
    """The directory of a complete checkpoint.

    `model` is a directory, "embedded", or a Hugging Face name such as "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice", of which
    "1.7B-CustomVoice" is enough. What is not in the Hugging Face cache is downloaded. `revision` is a branch, tag or
    commit of the repository. Raises CheckpointError that says what was tried and what to do.
    """
    if model == EMBEDDED:
        return embedded_path()
    directory = Path(model).expanduser()
    if directory.is_dir():
        return check_complete(directory)
    if _looks_like_path(model):
        raise CheckpointError(f"there is no checkpoint directory {directory}")
    from deployments.hub import snapshot  # its library takes half a second to import

    return check_complete(snapshot(repository(model), revision, is_complete=lambda found: not missing_files(found)))


def check_complete(directory: Path) -> Path:
    """`directory`, once it is sure that no file of a checkpoint is missing; CheckpointError names those that are."""
    missing = missing_files(directory)
    if missing:
        raise CheckpointError(f"{directory} is no complete Qwen3-TTS checkpoint, it lacks: {', '.join(missing)}")
    return directory


def missing_files(directory: Path) -> list[str]:
    """What a checkpoint consists of and `directory` lacks."""
    missing = [name for name in _NEEDED if not (directory / name).is_file()]
    unweighted = [part for part in _WEIGHTS if not _has_weights(directory / part)]
    return missing + [str(Path(part) / SINGLE_FILE) for part in unweighted]


def _has_weights(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


def repository(model: str) -> str:
    """The full Hugging Face name of `model`; raises CheckpointError for a name that can be none."""
    short = model.rsplit("/", 1)[-1].removeprefix("Qwen3-TTS-12Hz-")
    known = {name.lower(): full for name, full in REPOSITORIES.items()}
    if short.lower() in known and model.removesuffix(short) in ("", "Qwen/", "Qwen/Qwen3-TTS-12Hz-", "Qwen3-TTS-12Hz-"):
        return known[short.lower()]
    if "/" in model:
        return model
    raise CheckpointError(f"unknown model {model!r}{_hint(short)}")


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "~", os.sep)) or model.count("/") > 1


def _hint(short: str) -> str:
    close = difflib.get_close_matches(short, REPOSITORIES, n=1, cutoff=0.5)
    meant = f", did you mean {close[0]!r}?" if close else "."
    return (
        f"{meant} Released: {', '.join(REPOSITORIES)}; or {EMBEDDED!r}, a directory, or a Hugging Face name OWNER/NAME"
    )
