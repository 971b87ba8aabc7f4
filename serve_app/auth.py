"""API keys: who may speak, how often and how much at once.

A key is `talkray-ID-SECRET`. Its 256 random bits cannot be guessed, so a plain SHA-256 of it is safe to keep; a slow
hash would only cost time on every request. The key file is JSON:

    {"version": 1, "keys": [{"id": "1f0c9a3e", "name": "ada", "sha256": "...", "created": "2026-11-21T12:00:00+00:00",
                             "requests_per_minute": 600, "max_streams": 8, "revoked": null}]}
"""

import contextlib
import fcntl
import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from deployments.config import Strict
from deployments.errors import Overloaded, TalkrayError
from serve_app.refusals import Unauthorized

logger = logging.getLogger(__name__)

KEY_PREFIX = "talkray-"
_KEY = re.compile(rf"{KEY_PREFIX}([0-9a-f]{{8}})-[A-Za-z0-9_-]{{43}}")
_ID_BYTES, _SECRET_BYTES = 4, 32
_NO_DIGEST = "0" * 64
_MINUTE_S = 60.0

Limit = Annotated[int, Field(ge=1)] | None  # None: as much as the server can do


class KeyFileError(TalkrayError):
    """The key file cannot be used; the message says why."""


class KeyRecord(Strict):
    """What is kept of one key. The limits hold for each ingress replica on its own."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    name: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: str  # ISO 8601
    requests_per_minute: Limit = None
    max_streams: Limit = None
    revoked: str | None = None  # ISO 8601; a revoked key stays in the file, so that its id says whose it was


class KeyDocument(Strict):
    """The key file."""

    version: Literal[1] = 1
    keys: tuple[KeyRecord, ...] = ()


class Caller:
    """Whoever uses one key, or everyone where no keys are asked for; counts what they do."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests_per_minute: Limit = None
        self._max_streams: Limit = None
        self._allowance = math.inf  # requests that may be made at once
        self._counted_s = clock()
        self._num_streams = 0

    def limit(self, requests_per_minute: Limit, max_streams: Limit) -> None:
        """Set the limits; what has been counted stays."""
        self._requests_per_minute, self._max_streams = requests_per_minute, max_streams

    def request(self) -> None:
        """Count a request. Raises Overloaded where it is one too many in this minute."""
        if self._requests_per_minute is None:
            return
        now_s, per_s = self._clock(), self._requests_per_minute / _MINUTE_S
        earned = self._allowance + (now_s - self._counted_s) * per_s
        self._allowance, self._counted_s = min(earned, self._requests_per_minute), now_s
        if self._allowance < 1:
            message = f"This API key allows {self._requests_per_minute} requests per minute."
            raise Overloaded(message, (1 - self._allowance) / per_s)
        self._allowance -= 1

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream for as long as this holds. Raises Overloaded where it is one too many at once."""
        if self._max_streams is not None and self._num_streams >= self._max_streams:
            raise Overloaded(f"This API key allows {self._max_streams} streams at once.")
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1


class Keys:
    """The keys of a file, read again whenever the file changes: a new key works and a revoked one fails at once.

    While the file holds something else than keys the last good ones stay; a file that is gone leaves none.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._records: dict[str, KeyRecord] = {}
        self._callers: dict[str, Caller] = {}
        self._seen = _stamp(file)
        self._take(read_keys(file))

    def caller(self, key: str | None) -> Caller:
        """Who uses `key`. Raises Unauthorized."""
        self._refresh()
        if key is None:
            raise Unauthorized("An API key is required, for example as 'Authorization: Bearer KEY'.")
        match = _KEY.fullmatch(key)
        record = self._records.get(match[1]) if match else None
        digest = record.sha256 if record else _NO_DIGEST
        if not hmac.compare_digest(_digest(key), digest) or record is None:
            raise Unauthorized("The API key is not valid.")
        return self._callers[record.id]

    def _refresh(self) -> None:
        stamp = _stamp(self._file)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._take(read_keys(self._file) if stamp else KeyDocument())
        except KeyFileError as error:
            logger.error("keeping the API keys that were read before: %s", error)
        else:
            logger.warning("read %d API keys from %s", len(self._records), self._file)

    def _take(self, document: KeyDocument) -> None:
        self._records = {record.id: record for record in document.keys if record.revoked is None}
        self._callers = {key_id: self._callers.get(key_id) or Caller() for key_id in self._records}
        for record in self._records.values():
            self._callers[record.id].limit(record.requests_per_minute, record.max_streams)


def read_keys(file: Path) -> KeyDocument:
    """Raises KeyFileError."""
    try:
        return KeyDocument.model_validate_json(file.read_bytes())
    except OSError as error:
        hint = "`talkray key create NAME` writes it"
        raise KeyFileError(f"the key file {file} cannot be read ({error.strerror}): {hint}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise KeyFileError(f"the key file {file} is not one: {where}: {first['msg']}") from None


def create_key(file: Path, name: str, *, requests_per_minute: Limit = None, max_streams: Limit = None) -> str:
    """Add a key to the file, which is made where there is none; returns the key, which is kept nowhere."""
    with _rewriting(file) as document:
        key_id = secrets.token_hex(_ID_BYTES)
        key = f"{KEY_PREFIX}{key_id}-{secrets.token_urlsafe(_SECRET_BYTES)}"
        record = KeyRecord(
            id=key_id,
            name=name,
            sha256=_digest(key),
            created=_now(),
            requests_per_minute=requests_per_minute,
            max_streams=max_streams,
        )
        _write(file, KeyDocument(keys=(*document.keys, record)))
    return key


def revoke_keys(file: Path, id_or_name: str) -> list[KeyRecord]:
    """End the valid keys with this id or name; returns them. Raises KeyFileError where there is none."""
    with _rewriting(file) as document:
        ended = [key for key in document.keys if key.revoked is None and id_or_name in (key.id, key.name)]
        if not ended:
            raise KeyFileError(f"{file} has no valid key with the id or name {id_or_name!r}")
        now = _now()
        keys = [key.model_copy(update={"revoked": now}) if key in ended else key for key in document.keys]
        _write(file, KeyDocument(keys=tuple(keys)))
    return ended


@contextlib.contextmanager
def _rewriting(file: Path) -> Iterator[KeyDocument]:
    """What the file holds, while no other command changes it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield read_keys(file) if file.exists() else KeyDocument()
    finally:
        os.close(directory)


def _write(file: Path, document: KeyDocument) -> None:
    """Replace the file at once, so that a server never reads half of it; owner and mode stay."""
    file = file.resolve()
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as out:
        out.write(document.model_dump_json(indent=1) + "\n")
    if file.exists():
        shutil.copymode(file, new)
        with contextlib.suppress(PermissionError):
            os.chown(new, file.stat().st_uid, file.stat().st_gid)
    new.replace(file)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does; None where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
