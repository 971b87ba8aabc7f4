"""Sign access tokens: HMAC-SHA256 with the secrets of a file that all ingress replicas have."""

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

PREFIX = "ek_"  # OpenAI's clients refuse other tokens in a browser
_TOKEN = re.compile(rf"{PREFIX}\.?[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_LEAST_CHARS = 32
_SALT = "talkray.access_tokens.1"  # separates tokens from other uses of the same secret; 1 is the payload version
_HOW = {"key_derivation": "hmac", "digest_method": hashlib.sha256}


class NoSecrets(ExtensionError):
    """This server cannot sign tokens; the message says what to set."""

    kind = ErrorKind(503, "server_error", "tokens_unavailable")


class Secrets:
    """The secrets of a file, one per line. The first signs, all are accepted. Read again whenever the file changes.

    While the file cannot be read or is invalid, the last good secrets stay. If the file is deleted, there are none.
    """

    def __init__(self, file: Path, *, is_ours: bool) -> None:
        """`is_ours`: no other node needs the file, so this process creates it if it is missing."""
        self._file, self._is_ours = file, is_ours
        self._seen: Stamp | None = None
        self._serializer: URLSafeSerializer | None = None
        self._failure = ""  # the last one

    def check(self) -> None:
        """Raises StartError if the file cannot be used."""
        try:
            _read(self._file)
        except (ConfigError, OSError) as error:
            raise StartError(f"api.access_tokens.secrets_file: {error}") from None

    def sign(self, payload: Mapping[str, object]) -> str:
        """The token with this payload. Raises NoSecrets."""
        if self._is_ours:
            self._create()
        if (serializer := self._current()) is None:
            raise NoSecrets(
                "This server has no secret to sign access tokens. Put one into `token-secrets` beside the key file, or "
                "into api.access_tokens.secrets_file, on every node with an ingress replica (docs/access-tokens.md)."
            )
        return PREFIX + serializer.dumps(payload)

    def read(self, token: str) -> dict[str, Any]:
        """The payload of a token. Raises Unauthorized if exactly this token was not signed with one of the secrets.

        Base64 of 32 bytes has two spare bits: other characters can mean the same signature. They are refused too.
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
        raise Unauthorized("The access token is not valid: it was altered, or this server did not issue it.")

    def _current(self) -> URLSafeSerializer | None:
        try:
            stamp = file_stamp(self._file)
            if stamp != self._seen:
                kept = _read(self._file) if stamp else []
                newest_last = kept[::-1]
                self._serializer = URLSafeSerializer(newest_last, salt=_SALT, signer_kwargs=_HOW) if kept else None
                self._seen, self._failure = stamp, ""
        except (ConfigError, OSError) as error:
            self._log(f"keeping the secrets of access tokens that were read before: {error}")
        return self._serializer

    def _log(self, failure: str) -> None:
        """Log a failure once, until a different one occurs."""
        if failure != self._failure:
            logger.error("%s", failure)
        self._failure = failure

    def _create(self) -> None:
        """Write a file with a new secret if there is none. Raises nothing: `_current` finds no file then."""
        new = self._file.with_name(f".{self._file.name}.{secrets.token_hex(4)}.new")
        try:
            if self._file.exists():
                return
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as out:
                out.write(secrets.token_hex(_LEAST_CHARS) + "\n")
            with suppress(FileExistsError):
                os.link(new, self._file)  # unlike a rename it replaces no file that another replica has just made
            new.unlink()
        except OSError as error:
            self._log(f"no secret for access tokens can be written to {self._file}: {error.strerror}")


def _read(file: Path) -> list[str]:
    """Raises ConfigError, OSError."""
    found = [line.strip() for line in file.read_text(encoding="ascii", errors="replace").splitlines()]
    kept = [line for line in found if line and not line.startswith("#")]
    if not kept or min(map(len, kept)) < _LEAST_CHARS:
        reason = f"has no secret, or one with fewer than {_LEAST_CHARS} characters"
        raise ConfigError(f"{file} {reason}: write one secret in each line, such as `openssl rand -hex 32` prints")
    return kept
