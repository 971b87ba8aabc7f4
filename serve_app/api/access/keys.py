"""API keys and the key file.

A key is `talkray-ID-SECRET`. Its 256 random bits cannot be guessed, so a plain SHA-256 hash is safe to store. A slow
hash would only add latency to every request. The key file is JSON:

    {"version": 1, "keys": [{"id": "1f0c9a3e", "name": "ada", "sha256": "...", "created": "2026-11-21T12:00:00+00:00",
                             "requests_per_minute": 600, "max_streams": 8, "revoked": null}]}
"""

import hashlib
import hmac
import logging
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError

from deployments.config import Strict
from serve_app.api.error_replies import Unauthorized
from serve_app.config import ConfigError

logger = logging.getLogger(__name__)

KEY_PREFIX = "talkray-"
_KEY = re.compile(rf"{KEY_PREFIX}([0-9a-f]{{8}})-[A-Za-z0-9_-]{{43}}")
_NO_DIGEST = "0" * 64

LONGEST_NAME = 512
Limit = Annotated[int, Field(ge=1)] | None  # None: no limit
Stamp = tuple[int, int, int, int]


def _cut(name: object) -> object:
    """Truncate a key name that exceeds the limit, as in older files. Owner names of stored voices are truncated
    likewise.
    """
    return name[:LONGEST_NAME] if isinstance(name, str) else name


class KeyRecord(Strict):
    """Record of one key. Each ingress replica applies the limits separately."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    name: Annotated[str, BeforeValidator(_cut), Field(max_length=LONGEST_NAME)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: Annotated[str, Field(max_length=40)]  # ISO 8601
    requests_per_minute: Limit = None
    max_streams: Limit = None
    admin: bool = False  # may see the stored voices of all owners
    # ISO 8601. A revoked key stays in the file as a record of who owned its id.
    revoked: Annotated[str, Field(max_length=40)] | None = None


class KeyDocument(Strict):
    """Contents of the key file."""

    version: Literal[1] = 1
    keys: Annotated[tuple[KeyRecord, ...], Field(max_length=1_000_000)] = ()


class Keys:
    """Valid keys from the key file. Changes to the file, such as new and revoked keys, apply to the next request.

    If the file cannot be read or is invalid, the last valid keys remain in use, and every call retries the read. If the
    file was deleted, all keys are invalid.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._records: dict[str, KeyRecord] = {}
        self._names = frozenset[str]()
        self._seen = file_stamp(file)
        self._failure = ""  # error of the last read, logged once
        self._use(read_keys(file))

    def find(self, key: str | None) -> KeyRecord:
        """Return the record of `key`. Raises Unauthorized."""
        self._refresh()
        if key is None:
            raise Unauthorized("An API key is required, for example as 'Authorization: Bearer KEY'.")
        match = _KEY.fullmatch(key)
        record = self._records.get(match[1]) if match else None
        digest = record.sha256 if record else _NO_DIGEST
        if not hmac.compare_digest(digest_of(key), digest) or record is None:
            raise Unauthorized("The API key is not valid.")
        return record

    def of_id(self, key_id: str) -> KeyRecord:
        """Return the record of the valid key with this id. Raises Unauthorized."""
        self._refresh()
        if (record := self._records.get(key_id)) is None:
            raise Unauthorized("The API key that issued this credential has been revoked.")
        return record

    def has(self, key: str | None) -> bool:
        try:
            self.find(key)
        except Unauthorized:
            return False
        return True

    def has_name(self, name: str) -> bool:
        """Return whether a valid key has this name."""
        self._refresh()
        return name in self._names

    def current_record(self, record: KeyRecord) -> KeyRecord:
        """Return the current record of a previously valid key. Raises Unauthorized if the key has been revoked."""
        self._refresh()
        now = self._records.get(record.id)
        if now is None or now.sha256 != record.sha256:
            raise Unauthorized("The API key is no longer valid.")
        return now

    def _refresh(self) -> None:
        try:
            stamp = file_stamp(self._file)
            if stamp == self._seen:
                return
            self._use(read_keys(self._file) if stamp else KeyDocument())
        except ConfigError as error:
            if str(error) != self._failure:
                logger.error("cannot reread the API keys, the previous keys stay valid: %s", error)
            self._failure = str(error)
        else:
            self._seen, self._failure = stamp, ""
            logger.warning("read %d API keys from %s", len(self._records), self._file)

    def _use(self, document: KeyDocument) -> None:
        self._records = {record.id: record for record in document.keys if record.revoked is None}
        self._names = frozenset(record.name for record in self._records.values())


def read_keys(file: Path) -> KeyDocument:
    """Read and validate the key file. Raises ConfigError."""
    try:
        return KeyDocument.model_validate_json(file.read_bytes())
    except OSError as error:
        hint = "create it with `talkray key create NAME`"
        raise ConfigError(f"the key file {file} cannot be read ({error.strerror}): {hint}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"the key file {file} is invalid: {where}: {first['msg']}") from None


def file_stamp(file: Path) -> Stamp | None:
    """Return a value that changes whenever the file changes, even if its mtime is reset. Return None if the file is
    missing. Raises ConfigError if the file cannot be accessed.
    """
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"the key file {file} cannot be accessed ({error.strerror})") from None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
