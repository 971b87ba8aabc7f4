"""Resolution of a model's name to a checkpoint directory: a local folder, the Hugging Face hub, or the embedded voice.

This module does not import torch, because the application uses it to resolve `auto`. Importing the hub's library takes
half a second, so only functions that need the library import it.
"""

import difflib
import errno
import io
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from deployments.embedded_voice.checkpoint import EMBEDDED, PACKED, place, unpacked
from deployments.errors import CheckpointError, StartError

T = TypeVar("T")

# `auto` prefers earlier entries.
REPOSITORIES = {
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
_FAMILY = {"config.json": "qwen3_tts", "speech_tokenizer/config.json": "qwen3_tts_tokenizer_12hz"}  # model_type of each
_ADAPTER = "adapter_config.json"
_HUB_S = 2.0
_ATTEMPTS = 5
# Format of the download progress of tqdm, and the interval of its lines in seconds
_LINE = "{n_fmt}B of {total_fmt}B, {rate_fmt}, {remaining} left"
_LINE_S = 2.0
_REFUSALS = {
    401: "it requires authentication: set HF_TOKEN to a token with read access",
    403: "this account has no access: accept the repository's terms on the hub, or set HF_TOKEN to a token with access",
    404: "the repository does not exist",
}

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A concrete model, and the reason for its selection."""

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


def locate(model: str, *, report: Report | None = None) -> Path:
    """Return the directory of a complete checkpoint. `report` receives a line of download progress every two seconds.

    `model` is a directory, "embedded", "embedded-base", or a Hugging Face name such as
    "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice", which may be shortened to "1.7B-CustomVoice". A checkpoint that is not in
    the Hugging Face cache is downloaded. Raises CheckpointError with the attempts made and the remedy.
    """
    if model in PACKED:
        return unpacked(model, cache_directory())
    return find(model) or check_complete(_download(repository(model), report or (lambda line: None)))


def find(model: str) -> Path | None:
    """Return the result of `locate` without download or unpacking; None if either would be needed."""
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


def found(model: str) -> Path | None:
    """Return a folder with the small files of a checkpoint, or None if the checkpoint is not on this machine."""
    try:
        return PACKED[model][-1] if model in PACKED else find(model)
    except CheckpointError:
        return None


def ask_hub(name: str) -> None:
    """Raise CheckpointError unless the Hugging Face hub confirms within two seconds that repository `name` exists."""
    answers: queue.Queue[OSError | None] = queue.Queue()
    # Run the request in a thread, because timeouts do not limit the DNS lookup of the hub's address.
    threading.Thread(target=lambda: answers.put(_asked(name)), daemon=True).start()
    try:
        error = answers.get(timeout=_HUB_S)
    except queue.Empty:
        error = TimeoutError(f"the hub does not answer within {_HUB_S:g} s")
    if error is not None:
        raise CheckpointError(_download_failed(name, error)) from error


def _asked(name: str) -> OSError | None:
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


def check_complete(directory: Path) -> Path:
    """Return `directory` after checking that it contains a complete checkpoint of Qwen3-TTS.

    Raises CheckpointError with the other family or the missing files.
    """
    if (directory / _ADAPTER).is_file() and not (directory / "config.json").is_file():
        raise CheckpointError(_unmerged(str(directory)))
    for name in _FAMILY:
        if (directory / name).is_file():
            _check_family(str(directory), name, directory / name)
    missing = missing_files(directory)
    if missing:
        raise CheckpointError(_incomplete(str(directory), missing))
    return directory


def missing_files(directory: Path) -> list[str]:
    missing = _missing(lambda name: (directory / name).is_file())
    return missing + [str(file.relative_to(directory)) for file in _shards(directory) if not file.is_file()]


def _missing(has: Callable[[str], bool]) -> list[str]:
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
    """Return the file of each tensor according to an index of shards. Raises CheckpointError for an invalid index."""
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors shards: {error!r}") from error


def read_json(file: Path) -> Any:
    """Return the content of a checkpoint's JSON file. Raises CheckpointError for a missing or invalid file."""
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


def _incomplete(checkpoint: str, missing: list[str]) -> str:
    return f"{checkpoint} is not a complete Qwen3-TTS checkpoint. Missing files: {', '.join(missing)}"


def _unmerged(checkpoint: str) -> str:
    return f"{checkpoint} holds a LoRA adapter only: merge it into its base model first (PEFT: merge_and_unload)"


def _check_family(checkpoint: str, name: str, file: Path) -> None:
    """Raise CheckpointError unless `file`, the file `name` of `checkpoint`, describes a supported model."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{name} of {checkpoint} is not JSON: {error}") from None
    family = config.get("model_type") if isinstance(config, dict) else None
    if family != _FAMILY[name]:
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of another family: {name} has model_type {family!r}, but Talkray requires"
            f" Qwen3-TTS at 12 Hz ({_FAMILY[name]!r})"
        )
    if "quantization_config" in config:
        raise CheckpointError(f"{checkpoint} is quantized ({name}): Talkray supports float32, float16 and bfloat16")


def repository(model: str) -> str:
    """Return the full Hugging Face name of `model`. Raises CheckpointError if the name is unknown."""
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


def _download(name: str, report: Report) -> Path:
    """Download repository `name` with the hub's client, verify all hashes, and return its directory in the cache."""
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
    if _ADAPTER in names and "config.json" not in names:
        raise CheckpointError(_unmerged(name))
    for file in _FAMILY:
        if file in names:
            _check_family(name, file, Path(hf_hub_download(name, file, revision=info.sha)))
    if missing := _missing(names.__contains__):
        raise CheckpointError(_incomplete(name, missing))
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
    """Return a progress bar class for the hub's client that reports the downloaded bytes as lines."""
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


def _cached(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except OSError:
        return None
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is not a Hugging Face name: {error}") from None


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


def cache_directory() -> Path:
    """Return TALKRAY_CACHE, or else a folder in the user's cache. Raises StartError if the user has no home folder."""
    named = os.environ.get("TALKRAY_CACHE")
    try:
        return Path(named) if named else Path.home() / ".cache" / "talkray"
    except RuntimeError:  # the container's UID may have no passwd entry
        raise StartError("this user has no home folder: set HOME, or name a folder in TALKRAY_CACHE") from None
