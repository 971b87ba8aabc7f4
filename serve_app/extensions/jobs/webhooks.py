"""Notify a client's server that a job has ended, as specified by https://www.standardwebhooks.com.

No other part of Talkray connects to an address that a client has sent. Webhooks connect only to hosts in
`api.jobs.webhook_hosts` and do not follow redirects.
"""

import base64
import binascii
import hashlib
import hmac
import json
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from deployments.errors import InvalidRequest, StartError
from serve_app.config import is_loopback
from serve_app.extensions.jobs.settings import JobSettings
from serve_app.extensions.jobs.work import Json
from serve_app.extensions.voices.stored_voice import now

WEBHOOK = "webhook"
_PREFIX = "whsec_"
_LONGEST_URL = 2000
_TIMEOUT = aiohttp.ClientTimeout(total=10)


class Webhooks:
    """Client that calls webhooks on the hosts that the settings allow."""

    def __init__(self, settings: JobSettings) -> None:
        """Read the secret from its file. Raises StartError if the file is unreadable or its secret has a wrong size."""
        self._hosts = settings.webhook_hosts
        file = settings.webhook_secret_file
        self._secret = b"" if file is None else _secret_of(file)

    def checked(self, url: object) -> str | None:
        """Check and return the `webhook` field of a job. Raises InvalidRequest if the server may not call the URL."""
        if url is None:
            return None
        if not isinstance(url, str) or len(url) > _LONGEST_URL:
            raise InvalidRequest(f"{WEBHOOK} must be a URL of at most {_LONGEST_URL} characters.", WEBHOOK)
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidRequest(f"{WEBHOOK}: {error}.", WEBHOOK) from None
        if host not in self._hosts:
            message = f"{WEBHOOK}: host {str(host)[:80]!r} is not allowed. Use a host from api.jobs.webhook_hosts."
            raise InvalidRequest(message, WEBHOOK)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
            raise InvalidRequest(f"{WEBHOOK}: use https://. Only a loopback host may use http://.", WEBHOOK)
        if "@" in parts.netloc or parts.fragment:
            raise InvalidRequest(f"{WEBHOOK}: remove the user, password and fragment from the URL.", WEBHOOK)
        return url

    async def notify(self, url: str, owner: str, job: Json) -> str | None:
        """Call the webhook. Return None after a 2xx response, or else why the call failed.

        One secret signs the calls of all owners, so the signed body also contains the owner and the URL.
        """
        told = {"type": f"audio.job.{job['status']}", "timestamp": now(), "owner": owner, "data": job}
        content = json.dumps(told).encode()
        message_id, timestamp = f"{job['id']}.{job['ended_at']}", str(now())
        signed = hmac.digest(self._secret, f"{message_id}.{timestamp}.".encode() + content, hashlib.sha256)
        headers = {
            "content-type": "application/json",
            "webhook-id": message_id,
            "webhook-timestamp": timestamp,
            "webhook-signature": f"v1,{base64.b64encode(signed).decode()}",
        }
        try:
            self.checked(url)  # the allowed hosts may have changed since the job was created
            async with (
                aiohttp.ClientSession(timeout=_TIMEOUT) as session,
                session.post(url, data=content, headers=headers, allow_redirects=False) as answer,
            ):
                return None if answer.ok and answer.status < 300 else f"the server returned {answer.status}"
        except InvalidRequest as error:
            return error.message
        except TimeoutError:
            return f"the server did not respond within {_TIMEOUT.total:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"the server cannot be reached: {str(error)[:200]}"


def _secret_of(file: Path) -> bytes:
    try:
        secret = base64.b64decode(file.read_text(encoding="ascii").strip().removeprefix(_PREFIX), validate=True)
    except (OSError, UnicodeError, binascii.Error) as error:
        raise StartError(f"api.jobs.webhook_secret_file: {file} cannot be read: {error}") from None
    if not 24 <= len(secret) <= 64:
        raise StartError(f"api.jobs.webhook_secret_file: {file} needs 24 to 64 bytes. Run `openssl rand -base64 32`")
    return secret
