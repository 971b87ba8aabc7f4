"""Checkpoints from the Hugging Face hub and its cache."""

import difflib
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError

from deployments.errors import CheckpointError
from deployments.released import REPOSITORIES


def snapshot(name: str, revision: str | None, *, is_complete: Callable[[Path], bool]) -> Path:
    """The directory of repository `name`; downloaded where the cache has none that is complete.

    Raises CheckpointError that says what was tried and what to do.
    """
    cached = _cached(name, revision)
    if cached is not None and is_complete(cached):
        return cached
    try:
        return Path(snapshot_download(name, revision=revision))
    except OSError as error:  # the hub's errors are OSErrors
        raise CheckpointError(_download_failed(name, revision, error)) from error


def _cached(name: str, revision: str | None) -> Path | None:
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except OSError:
        return None
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is no Hugging Face name: {error}") from None


def _download_failed(name: str, revision: str | None, error: Exception) -> str:
    at = f" at revision {revision}" if revision else ""
    close = difflib.get_close_matches(name, REPOSITORIES.values(), n=1, cutoff=0.8)
    meant = f"Did you mean {close[0]}? " if close and close[0] != name else ""
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"{name}{at} is not in the cache {constants.HF_HUB_CACHE} and could not be downloaded: {reason[0]}. {meant}"
        f"Check the network and HF_HOME, or fetch it elsewhere with `hf download {name}` and name its directory here."
    )
