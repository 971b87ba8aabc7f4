"""Checkpoint downloads from the Hugging Face Hub, and error messages for failed downloads.

The hub library takes half a second to import, so it is imported only where it is needed.
"""

import difflib
import errno
import io
import queue
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from deployments.errors import CheckpointError
from deployments.weights.store import (
    ADAPTER,
    FAMILY,
    REPOSITORIES,
    Report,
    check_family,
    incomplete,
    missing_of,
    unmerged,
)

_HUB_S = 2.0
_ATTEMPTS = 5
# Format of tqdm's download progress, and the interval between its lines in seconds
_LINE = "{n_fmt}B of {total_fmt}B, {rate_fmt}, {remaining} left"
_LINE_S = 2.0
_REFUSALS = {
    401: "it requires authentication: set HF_TOKEN to a token with read access",
    403: "this account has no access: accept the repository's terms on the hub, or set HF_TOKEN to a token with access",
    404: "the repository does not exist",
}


def ask_hub(name: str) -> None:
    """Raise CheckpointError unless the Hugging Face hub confirms within two seconds that repository `name` exists."""
    answers: queue.Queue[OSError | None] = queue.Queue()
    # Run the request in a thread, because timeouts do not apply to the DNS lookup of the hub's address.
    threading.Thread(target=lambda: answers.put(_query_error(name)), daemon=True).start()
    try:
        error = answers.get(timeout=_HUB_S)
    except queue.Empty:
        error = TimeoutError(f"the hub does not answer within {_HUB_S:g} s")
    if error is not None:
        raise CheckpointError(_download_failed(name, error)) from error


def _query_error(name: str) -> OSError | None:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return OSError("HF_HUB_OFFLINE is set")
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{constants.ENDPOINT}/api/models/{name}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_HUB_S):
            return None
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        return error


def download(name: str, report: Report) -> Path:
    """Download repository `name` with the hub client, verify all hashes, and return its directory in the cache."""
    import httpx2

    try:
        return _fetch(name, report)
    except (OSError, httpx2.HTTPError) as error:  # the hub's errors are OSErrors
        raise CheckpointError(_download_failed(name, error)) from error


def _fetch(name: str, report: Report) -> Path:
    import httpx2
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

    report(f"asking {constants.ENDPOINT} for {name}")
    info = HfApi().model_info(name)
    names = {file.rfilename for file in info.siblings or ()}
    if ADAPTER in names and "config.json" not in names:
        raise CheckpointError(unmerged(name))
    for file in FAMILY:
        if file in names:
            check_family(name, file, Path(hf_hub_download(name, file, revision=info.sha)))
    if missing := missing_of(names.__contains__):
        raise CheckpointError(incomplete(name, missing))
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            directory = Path(snapshot_download(name, tqdm_class=_progress_lines(name, report)))
            break
        except httpx2.TransportError as error:  # such as a connection reset, which the client does not retry
            if attempt == _ATTEMPTS:
                raise
            report(f"downloading {name}: the connection broke ({_reason(error)}), trying again")
            time.sleep(attempt)
    report(f"checking {name}")
    for wrong in HfApi().verify_repo_checksums(name, revision=info.sha).mismatches:
        (directory / wrong["path"]).resolve().unlink()
        raise CheckpointError(
            f"{wrong['path']} of {name} is corrupt: its {wrong['algorithm']} is {wrong['actual']}, the hub expects"
            f" {wrong['expected']}. The file was deleted. Start again. If the error repeats, ask the operator of the"
            f" proxy or mirror behind {constants.ENDPOINT}"
        )
    return directory


def _progress_lines(name: str, report: Report) -> type:
    """Return a progress bar class for the hub client that reports downloaded bytes as lines."""
    from tqdm import tqdm

    class Lines(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
        def __init__(self, **options: Any) -> None:
            is_silent = options["desc"] != "Downloading bytes"
            line = {"bar_format": f"downloading {name}: {_LINE}", "mininterval": _LINE_S, "file": io.StringIO()}
            super().__init__(**options | line | {"leave": False, "disable": is_silent})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if msg is None and self.total:
                report(str(self))

    return Lines


def _download_failed(name: str, error: Exception) -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {name} does not fit in {HF_HUB_CACHE}. Free space, or set HF_HOME to a folder on"
            " another disk. Downloaded files are kept"
        )
    close = difflib.get_close_matches(name, REPOSITORIES.values(), n=1, cutoff=0.8)
    meant = f"Did you mean {close[0]}? " if close and close[0] != name else ""
    return (
        f"{name} is not in the cache {HF_HUB_CACHE} and could not be downloaded: {_reason(error)}. {meant}"
        f"Check the network and HF_HOME, or download it elsewhere with `hf download {name}` and use its directory here."
    )


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in _REFUSALS:
        return f"the hub answers {status}, {_REFUSALS[status]}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
