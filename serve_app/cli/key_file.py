"""Changes to the key file: commands create and revoke keys; servers only read them."""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from serve_app.api.access.keys import KEY_PREFIX, LONGEST_NAME, KeyDocument, KeyRecord, Limit, digest_of, read_keys
from serve_app.config import ConfigError

_ID_BYTES, _SECRET_BYTES = 4, 32


def create_key(
    file: Path, name: str, *, requests_per_minute: Limit = None, max_streams: Limit = None, admin: bool = False
) -> str:
    """Add a key to the file and return the key. Creates the file if it is missing. The file stores only a hash of the
    key.
    """
    if len(name) > LONGEST_NAME:
        raise ConfigError(f"the name of a key has {len(name)} characters; use at most {LONGEST_NAME}")
    with _rewriting(file) as document:
        key_id = secrets.token_hex(_ID_BYTES)
        key = f"{KEY_PREFIX}{key_id}-{secrets.token_urlsafe(_SECRET_BYTES)}"
        record = KeyRecord(
            id=key_id,
            name=name,
            sha256=digest_of(key),
            created=_now(),
            requests_per_minute=requests_per_minute,
            max_streams=max_streams,
            admin=admin,
        )
        _write(file, KeyDocument(keys=(*document.keys, record)))
    return key


def revoke_keys(file: Path, id_or_name: str) -> list[KeyRecord]:
    """Revoke all valid keys with this id or name and return their records. Raises ConfigError if the file has none."""
    return _change(file, id_or_name, {"revoked": _now()})


def limit_keys(file: Path, id_or_name: str, limits: Mapping[str, Limit]) -> list[KeyRecord]:
    """Set `limits` of all valid keys with this id or name, as `revoke_keys` revokes them."""
    return _change(file, id_or_name, limits)


def _change(file: Path, id_or_name: str, changes: Mapping[str, object]) -> list[KeyRecord]:
    with _rewriting(file) as document:
        old = [key for key in document.keys if key.revoked is None and id_or_name in (key.id, key.name)]
        if not old:
            raise ConfigError(f"{file} has no valid key with the id or name {id_or_name!r}")
        new = {key.id: key.model_copy(update=changes) for key in old}
        _write(file, KeyDocument(keys=tuple(new.get(key.id, key) for key in document.keys)))
    return list(new.values())


@contextlib.contextmanager
def _rewriting(file: Path) -> Iterator[KeyDocument]:
    """Yield the file's contents while holding a lock that keeps other commands from changing it. Raises ConfigError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        directory = os.open(file.parent, os.O_RDONLY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            yield read_keys(file) if file.exists() else KeyDocument()
        finally:
            os.close(directory)
    except OSError as error:
        raise ConfigError(f"the key file {file} cannot be written ({error.strerror}). The file is unchanged") from None


def _write(file: Path, document: KeyDocument) -> None:
    """Replace the file atomically, so a server never reads a partial file. Keeps the file's owner and mode."""
    file = file.resolve()
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as out:
            out.write(document.model_dump_json(indent=1) + "\n")
        if file.exists():
            shutil.copymode(file, new)
            with contextlib.suppress(PermissionError):
                os.chown(new, file.stat().st_uid, file.stat().st_gid)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
