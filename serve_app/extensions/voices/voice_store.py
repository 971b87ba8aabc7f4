"""Voice store in a folder or in a bucket of S3, Google Cloud or Azure. All methods block.

    voices/ID.json    consents/ID.json    records with checksums: a voice exists if its record exists
    designs/ID.json                       candidates for voices, which `sweep` deletes after an hour
    lexicons/ID.json                      respellings of words
    audio/ID/SHA256.flac                  recordings, written before the record that refers to the recording
    derived/ID/KEY.npz                    speaker vector and codes of a recording, for one checkpoint

The name of a recording is its checksum. In a folder, the store writes and syncs a file before it renames the file.
"""

import hashlib
import io
import json
import logging
import os
import secrets
import threading
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import LocalStore, ObjectStore, from_url
from pydantic import BaseModel

from deployments.errors import NotFound, StartError
from deployments.protocol import ClonePrompt
from serve_app.api.error_replies import ErrorKind, ExtensionError
from serve_app.extensions.voices.stored_voice import (
    DESIGN_S,
    ID,
    Stored,
    StoredConsent,
    StoredDesign,
    StoredLexicon,
    StoredVoice,
    Take,
)

if TYPE_CHECKING:
    from obstore.store import RetryConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=BaseModel)
Record = StoredVoice | StoredConsent | StoredDesign | StoredLexicon

_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
_KINDS: dict[str, type[Record]] = {"voices": StoredVoice, "consents": StoredConsent, "designs": StoredDesign}
_KINDS["lexicons"] = StoredLexicon
_OF_A_RECORD = ("audio", "derived")
_RETRIES: "RetryConfig" = {"max_retries": 2, "retry_timeout": timedelta(seconds=5)}
# Older files that have a temporary name, or no record, were left behind by a killed process.
_ABANDONED_S = 600.0
# Records larger than the first size predate the limits. To save memory, the store reads them one at a time.
_LARGE_RECORD_BYTES, _MOST_RECORD_BYTES = 6 << 20, 64 << 20


class StoreFailed(ExtensionError):
    """The voice store is unavailable. Clients see the message, so only the log contains the store's address."""

    kind = ErrorKind(503, "server_error", "voice_store_failed", retry=True)


class NoStore(StoreFailed):
    """The server does not have a voice store. The message names the setting to change."""

    kind = ErrorKind(503, "server_error", "voice_store_failed")


class Damaged(ExtensionError):
    """A stored object is damaged or missing."""

    kind = ErrorKind(500, "server_error", "voice_damaged")


def default_folder() -> Path:
    """Return the `voices` folder in TALKRAY_DATA or in the user's data. Raises StartError if no home folder exists."""
    if named := os.environ.get("TALKRAY_DATA"):
        return Path(named).absolute() / "voices"
    try:
        data = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser()
    except RuntimeError:
        raise StartError("this user does not have a home folder. Set TALKRAY_DATA or api.voices.store") from None
    return data / "talkray" / "voices"


def folder_of(location: str) -> Path | None:
    """Return the folder for the path or URL of a store, or None for a bucket. Raises StartError for other URLs."""
    url = urlsplit(location)
    if url.scheme in _SCHEMES:
        return None
    folder = Path(unquote(url.path) if url.scheme == "file" and not url.netloc else location)
    if url.scheme not in ("", "file") or not folder.is_absolute():
        buckets = "s3://BUCKET/PATH, gs://BUCKET/PATH or az://CONTAINER/PATH"
        raise StartError(f"api.voices.store: {location!r} is not an absolute path or a bucket. Use /FOLDER, {buckets}")
    return folder


class VoiceStore:
    """Reads and writes records and recordings in a folder or bucket that several processes can share."""

    def __init__(self, location: str) -> None:
        """`location` is an absolute path or a URL. Raises StartError if the location is not usable."""
        self.location = location
        self.folder = folder_of(location)
        self._one_large = threading.Lock()
        self._failed = ""  # the last logged failure
        try:
            if self.folder is None:
                self._objects: ObjectStore = from_url(location, retry_config=_RETRIES)
            else:
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._objects = LocalStore(self.folder)
        except (BaseError, OSError) as error:
            raise StartError(f"api.voices.store: {location} cannot be used: {_first_line(error)}") from None

    def marks(self) -> "dict[str, obstore.ObjectMeta]":
        """Return the file metadata of each record by path. The metadata changes with the record. Raises StoreFailed."""
        return {
            meta["path"]: meta
            for kind in _KINDS
            for meta in self.listed(f"{kind}/")
            if ID.fullmatch(meta["path"].removeprefix(f"{kind}/").removesuffix(".json"))
        }

    def read(self, path: str) -> Record | None:
        """Return the record at a path of `marks`, or None if it was deleted. Raises Damaged and StoreFailed."""
        return self.get_record(path, _KINDS[path.partition("/")[0]])

    def get_record(self, path: str, kind: type[R]) -> R | None:
        """Return the record that `put_record` wrote, or None if it was deleted. Raises Damaged and StoreFailed."""
        content = self.get(path, most=_MOST_RECORD_BYTES)
        if content is None:
            return None
        is_large = len(content) > _LARGE_RECORD_BYTES
        try:
            with self._one_large if is_large else nullcontext():
                document = json.loads(content)
                record = document["record"]
                if _checksum(record) != document["sha256"]:
                    raise ValueError("the checksum does not match")
                return kind.read(record) if issubclass(kind, Stored) else kind.model_validate(record)
        except (ValueError, KeyError, TypeError) as error:  # ValidationError is a ValueError
            raise self._damaged(Path(path).stem, path, _first_line(error)) from None

    def write(self, record: Record, recordings: Mapping[str, bytes]) -> None:
        """Store the new recordings, by sha256, and then their record. Raises NotFound if the record is being deleted.

        If the store fails, raise StoreFailed and keep the old record. A deletion removes the record again after its
        recordings. A concurrent deletion therefore removes this record too, or this method finds the first recording
        missing.
        """
        path, first = path_of(record.id), _first_file(record)
        files = {_audio(record.id, sha256): recording for sha256, recording in recordings.items()}
        files[path] = record_file(record)
        gone = NotFound(f"{record.name!r} was deleted during this request.", None, "voice_not_found")
        is_recorded = first in files or self.meta(first) is not None
        if not is_recorded and self.meta(path) is None:
            raise gone
        for name, content in files.items():
            self.put(name, content)
        if is_recorded and self.meta(first) is None:
            self.delete(*files)
            raise gone

    def put_record(self, path: str, record: BaseModel) -> None:
        """Store a record with its checksum. If the store fails, raise StoreFailed and keep the old record."""
        self.put(path, record_file(record))

    def recording(self, record: Record, take: Take) -> bytes:
        """Return the FLAC file of a take. Raises Damaged, StoreFailed, and NotFound if the record was deleted."""
        path = _audio(record.id, take.sha256)
        content = self.get(path)
        if content is None and self.meta(path_of(record.id)) is None:
            raise NotFound(f"{record.name!r} ({record.id}) was deleted.", "voice", "voice_not_found")
        if content is None or hashlib.sha256(content).hexdigest() != take.sha256:
            problem = "the file is missing" if content is None else "the checksum does not match"
            raise self._damaged(f"A recording of {record.name!r} ({record.id})", path, problem)
        return content

    def _damaged(self, what: str, path: str, problem: str) -> Damaged:
        self._log(f"{path} is damaged", problem)
        return Damaged(f"{what} is missing or damaged in the store. Store it again, or restore it from a backup.")

    @contextmanager
    def _failing(self, problem: str, detail: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            self._log(detail, _first_line(error))
            raise StoreFailed(problem) from error

    def _log(self, failure: str, reason: str) -> None:
        """Log a failure, unless it repeats the last one. Ignore the reason, because it may contain a duration."""
        if failure != self._failed:
            logger.error("the store %s: %s: %s", self.location, failure, reason)
        self._failed = failure

    def remove(self, record: Record) -> None:
        """Delete a record and its files. Delete the record first, because `clear` or `sweep` deletes the other files if
        this process is killed. Delete the record again at the end: see `write`.
        """
        self.delete(path_of(record.id))
        for kind in _OF_A_RECORD:
            self.delete(*(meta["path"] for meta in self.listed(f"{kind}/{record.id}/", unnamed=True)))
        self.delete(path_of(record.id))

    def clear(self, record: Record, *, recorded_until: datetime | None) -> None:
        """Delete data derived from an old version of a voice. If its record was deleted, also delete recordings written
        until `recorded_until`, because later recordings belong to a new record with this ID. Raises StoreFailed.

        List the files before checking for the record, so that a folder mounted in between does not lose its files.
        """
        paths = []
        if isinstance(record, StoredVoice):
            derived = [meta["path"] for meta in self.listed(f"derived/{record.id}/", unnamed=True)]
            paths = [path for path in derived if path.split("/")[2].lstrip(".").startswith(record.key_prefix.hex())]
        if recorded_until is not None:
            audio = list(self.listed(f"audio/{record.id}/", unnamed=True))
            if self.meta(path_of(record.id)) is None:
                paths += [meta["path"] for meta in audio if meta["last_modified"] <= recorded_until]
        self.delete(*paths)

    def derived(self, voice: StoredVoice, key: bytes) -> ClonePrompt | None:
        """Return the stored prompt for this key, or None if it is missing or damaged. Raises StoreFailed."""
        content = self.get(_derived(voice, key))
        if content is None:
            return None
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:  # zip verifies checksums
                return ClonePrompt(arrays["speaker"], arrays.get("codes"))
        except (ValueError, KeyError, OSError, zipfile.BadZipFile):
            return None

    def keep_derived(self, voice: StoredVoice, key: bytes, prompt: ClonePrompt) -> None:
        """Store a prompt, unless it belongs to an old version of the voice. Raises Damaged and StoreFailed."""
        file = io.BytesIO()
        if prompt.codes is None:
            np.savez(file, speaker=prompt.speaker)
        else:
            np.savez(file, speaker=prompt.speaker, codes=prompt.codes)
        path = _derived(voice, key)
        self.put(path, file.getvalue())
        # A deletion removes the record first. A concurrent deletion therefore finds the new file, or this read fails.
        present = self.read(path_of(voice.id))
        if not isinstance(present, StoredVoice) or present.version != voice.version:
            self.delete(path)

    def sweep(self, now_s: float) -> int:
        """Delete old designs, and files that killed processes left behind. Return the number of deleted files.

        `now_s` counts seconds since 1970. Raises StoreFailed.
        """
        old_s, before_s = now_s - DESIGN_S, now_s - _ABANDONED_S
        old = [meta["path"] for meta in self.listed("designs/") if meta["last_modified"].timestamp() < old_s]
        self.delete(*old)
        known, over = self.marks(), defaultdict[str, list[str]](list)
        for kind in _OF_A_RECORD:
            for meta in self.listed(f"{kind}/"):
                record = path_of(meta["path"].split("/")[1])
                # Derived data is always newer than its record.
                if record not in known and (kind == "derived" or meta["last_modified"].timestamp() < before_s):
                    over[record].append(meta["path"])
        swept = [path for record, paths in over.items() if self.meta(record) is None for path in paths]  # see `clear`
        self.delete(*swept)
        new = () if self.folder is None else self.folder.rglob(".*.new")
        unnamed = [file for file in new if _is_older(file, before_s)]
        for file in unnamed:
            file.unlink(missing_ok=True)
        for empty in () if self.folder is None else self.folder.glob("*/*/"):
            if _is_older(empty, before_s):
                with suppress(OSError):  # the folder is not empty
                    empty.rmdir()
        return len(old) + len(swept) + len(unnamed)

    def listed(self, prefix: str, *, unnamed: bool = False) -> "Iterator[obstore.ObjectMeta]":
        """Yield the files below `prefix`. If `unnamed` is set, include files that still have a temporary name."""
        with self._failing("The store cannot be read", "listing failed"):
            for batch in obstore.list(self._objects, prefix):
                yield from (meta for meta in batch if unnamed or "/." not in meta["path"])

    def get(self, path: str, *, most: int | None = None) -> bytes | None:
        """Return the file, or None if it does not exist. Raises StoreFailed, and Damaged if it exceeds `most` bytes."""
        with self._failing("The store cannot be read", f"{path} cannot be read"), suppress(FileNotFoundError):
            found = obstore.get(self._objects, path)
            if most is not None and (size := found.meta["size"]) > most:
                raise self._damaged(Path(path).stem, path, f"the file has {size} bytes, more than {most}")
            return found.bytes().to_bytes()
        return None

    def meta(self, path: str) -> "obstore.ObjectMeta | None":
        """Return size, e_tag and time of an object, or None if it does not exist. Raises StoreFailed."""
        with self._failing("The store cannot be read", f"{path} cannot be read"), suppress(FileNotFoundError):
            return obstore.head(self._objects, path)
        return None

    def now_s(self) -> float:
        """Return the seconds since 1970 according to the clock that sets `last_modified`. For a bucket, this is the
        provider's clock. Raises StoreFailed.
        """
        if self.folder is not None:
            return time.time()
        self.put("clock", b"")
        meta = self.meta("clock")
        assert meta is not None, "the line above wrote the file"
        return meta["last_modified"].timestamp()

    def put(self, path: str, content: bytes) -> None:
        with self._failing("The store cannot be written, nothing was changed", f"{path} cannot be written"):
            if self.folder is None:
                obstore.put(self._objects, path, content)
            else:
                write_file(self.folder / path, content)

    def create(self, path: str) -> bool:
        """Create a small file. Return False if the file already exists. Raises StoreFailed."""
        own = secrets.token_bytes(16)
        with self._failing("The store cannot be written, nothing was changed", f"{path} cannot be written"):
            try:
                obstore.put(self._objects, path, own, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return self.get(path) == own  # if a response was lost, the retry finds its own file
        return True

    def delete(self, *paths: str) -> None:
        """Delete files. In a folder, also delete the temporary files that killed writers left behind."""
        with self._failing("The store cannot be written", f"{', '.join(paths[:1])} cannot be deleted"):
            files = set() if self.folder is None else {self.folder / path for path in paths}
            for new in [new for folder in {file.parent for file in files} for new in folder.glob(".*.new")]:
                if new.with_name(new.name[1:].rsplit(".", 2)[0]) in files:
                    new.unlink(missing_ok=True)
            for path in paths:
                with suppress(FileNotFoundError):
                    obstore.delete(self._objects, path)


def record_file(record: BaseModel) -> bytes:
    """Serialize a record with its checksum."""
    stored = record.model_dump(mode="json")
    return json.dumps({"sha256": _checksum(stored), "record": stored}).encode()


def write_file(file: Path, content: bytes) -> None:
    """Replace a file atomically and sync it to disk. If it raises OSError, the old file is kept."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = file.with_name(f".{file.name}.{secrets.token_hex(4)}.new")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    for folder in (file.parent, file.parent.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_older(file: Path, time_s: float) -> bool:
    """Return whether the file is older than `time_s`. Return False if it has since been deleted or renamed."""
    try:
        return file.stat().st_mtime < time_s
    except FileNotFoundError:
        return False


def tried(work: Callable[[], T]) -> T | Damaged:
    """Return the result of `work`, or its Damaged error, so that one damaged record does not hide the others."""
    try:
        return work()
    except Damaged as error:
        return error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def _checksum(record: object) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def path_of(record_id: str) -> str:
    """Return the path of the record with this ID."""
    kind = next((kind for kind in _KINDS if kind.startswith(record_id.partition("_")[0])), "none")
    return f"{kind}/{record_id}.json"


def _first_file(record: Record) -> str:
    """Return the path of the first recording, or the path of the record for a lexicon."""
    if isinstance(record, StoredLexicon):
        return path_of(record.id)
    return _audio(record.id, (record.takes[0] if isinstance(record, StoredVoice) else record.take).sha256)


def _audio(record_id: str, sha256: str) -> str:
    return f"audio/{record_id}/{sha256}.flac"


def _derived(voice: StoredVoice, key: bytes) -> str:
    return f"derived/{voice.id}/{key.hex()}.npz"
