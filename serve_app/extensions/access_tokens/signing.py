"""Sign access tokens with HMAC-SHA256, using secrets from a file that every ingress replica has."""

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from itsdangerous import BadData, URLSafeSerializer
from itsdangerous.encoding import base64_decode, base64_encode

from deployments.errors import StartError
from serve_app.api.access.keys import Stamp, file_stamp
from serve_app.api.error_replies import ErrorKind, ExtensionError, Unauthorized
from serve_app.config import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "ek_"  # in a browser, OpenAI's clients reject tokens without it
_TOKEN = re.compile(rf"{PREFIX}\.?[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_LEAST_CHARS = 32
_SALT = "talkray.access_tokens.1"  # separates tokens from other uses of a secret; 1 is the payload version
_HOW = {"key_derivation": "hmac", "digest_method": hashlib.sha256}


class NoSecrets(ExtensionError):
    """This server cannot sign access tokens. The message names the setting to change."""

    kind = ErrorKind(503, "server_error", "tokens_unavailable")


class Secrets:
    """Secrets from a file with one secret per line. The first one signs new tokens, and any of them can verify one.

    The server rereads the file whenever it changes. If the file is invalid or unreadable, the previous secrets remain
    valid. If the file is deleted, all tokens become invalid.
    """

    def __init__(self, file: Path, *, is_ours: bool) -> None:
        """If `is_ours` is set, this process creates a missing file, because no other node needs it."""
        self._file, self._is_ours = file, is_ours
        self._seen: Stamp | None = None
        self._serializer: URLSafeSerializer | None = None
        self._failure = ""  # the last logged failure

    def check(self) -> None:
        """Raise StartError if the file is not usable."""
        try:
            _read(self._file)
        except (ConfigError, OSError) as error:
            raise StartError(f"api.access_tokens.secrets_file: {error}") from None

    def sign(self, payload: Mapping[str, object]) -> str:
        """Return a signed token with this payload. Raises NoSecrets if the file does not contain a secret."""
        if self._is_ours:
            self._create()
        if (serializer := self._current()) is None:
            raise NoSecrets(
                "This server cannot sign access tokens without a secret. Write one to `token-secrets` next to the key "
                "file, or to api.access_tokens.secrets_file, on every ingress node (docs/access-tokens.md)."
            )
        return PREFIX + serializer.dumps(payload)

    def read(self, token: str) -> dict[str, Any]:
        """Verify a token and return its payload. Raises Unauthorized if the signature is wrong.

        Base64 of 32 bytes leaves two bits unused, so several strings decode to the same signature. Accept only the
        canonical string.
        """
        serializer = self._current()
        signature = token.rpartition(".")[2]
        try:
            if serializer is not None and _TOKEN.fullmatch(token):
                payload: dict[str, Any] = serializer.loads(token.removeprefix(PREFIX))
                if base64_encode(base64_decode(signature)).decode() == signature:
                    return payload
        except BadData:
            pass
        raise Unauthorized("The access token is invalid, because it was altered or comes from another server.")

    def _current(self) -> URLSafeSerializer | None:
        try:
            stamp = file_stamp(self._file)
            if stamp != self._seen:
                kept = _read(self._file) if stamp else []
                newest_last = kept[::-1]
                self._serializer = URLSafeSerializer(newest_last, salt=_SALT, signer_kwargs=_HOW) if kept else None
                self._seen, self._failure = stamp, ""
        except (ConfigError, OSError) as error:
            self._log(f"the secrets of access tokens cannot be read, so the previous ones remain valid: {error}")
        return self._serializer

    def _log(self, failure: str) -> None:
        """Log a failure, unless it repeats the last one."""
        if failure != self._failure:
            logger.error("%s", failure)
        self._failure = failure

    def _create(self) -> None:
        """Create the file with a new secret, unless it already exists. Log errors instead of raising them."""
        new = self._file.with_name(f".{self._file.name}.{secrets.token_hex(4)}.new")
        try:
            if self._file.exists():
                return
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as out:
                out.write(secrets.token_hex(_LEAST_CHARS) + "\n")
            with suppress(FileExistsError):
                os.link(new, self._file)  # unlike rename, link never replaces another replica's file
            new.unlink()
        except OSError as error:
            self._log(f"the secret of access tokens cannot be written to {self._file}: {error.strerror}")


def _read(file: Path) -> list[str]:
    """Return the secrets in a file. Raises OSError, and ConfigError if no secret is valid."""
    found = [line.strip() for line in file.read_text(encoding="ascii", errors="replace").splitlines()]
    kept = [line for line in found if line and not line.startswith("#")]
    if not kept or min(map(len, kept)) < _LEAST_CHARS:
        reason = f"needs one secret of at least {_LEAST_CHARS} characters per line"
        raise ConfigError(f"{file} {reason}. Create a secret with `openssl rand -hex 32`")
    return kept
