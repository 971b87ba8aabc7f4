"""Issue access tokens for a key and a purpose, verify the tokens in requests, and record used tokens in the store."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, partial

from starlette.routing import compile_path
from starlette.types import Scope

from deployments.errors import TalkrayError
from serve_app.api.access.callers import Granted
from serve_app.api.error_replies import Unauthorized
from serve_app.extension import ExtensionState
from serve_app.extensions.access_tokens.signing import PREFIX, NoSecrets, Secrets
from serve_app.extensions.voices.library import Voices

logger = logging.getLogger(__name__)

MOST_S = 3600
_MARKS = "tokens/"
_SWEEP_S = 3600.0
_OLD_S = 2 * MOST_S  # a token of this age has expired according to every clock in the cluster


@dataclass(frozen=True, slots=True)
class Purpose:
    """The requests for which a token is valid."""

    label: str  # for error messages
    places: tuple[str, ...]  # methods and paths; WS stands for WebSockets

    def fits(self, method: str, path: str) -> bool:
        own = (place.split() for place in self.places)
        return any(method == known and _pattern(template).match(path) for known, template in own)


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return compile_path(template)[0]


_SPEECH = (
    "POST /v1/audio/speech",
    "POST /openai/v1/audio/speech",
    "POST /openai/deployments/{deployment}/audio/speech",
)
_REALTIME = ("WS /v1/realtime", "WS /openai/v1/realtime", "WS /openai/realtime")
_ELEVENLABS = (
    "WS /v1/text-to-speech/{voice_id}/stream-input",
    "WS /v1/text-to-speech/{voice_id}/multi-stream-input",
    "WS /v1/text-to-dialogue/multi-stream-input",
)
PURPOSES = {
    "speech": Purpose("POST /v1/audio/speech", _SPEECH),
    "socket": Purpose("WebSockets", ("WS /{path:path}",)),
    "realtime": Purpose("OpenAI's Realtime WebSocket", _REALTIME),
    "tts_websocket": Purpose("ElevenLabs' WebSockets", _ELEVENLABS),
    "deepgram": Purpose("Deepgram's speech", ("POST /v1/speak", "WS /v1/speak", "POST /v2/speak", "WS /v2/speak")),
    "cartesia": Purpose("Cartesia's speech", ("POST /tts/bytes", "POST /tts/sse", "WS /tts/websocket")),
}


@dataclass(frozen=True, slots=True)
class Claims:
    """Signed content of a token."""

    key: str  # ID of the API key that issued the token
    purpose: str
    expires_at: int  # seconds since 1970
    session: Mapping[str, object] = field(default_factory=dict)  # settings of a WebSocket session
    once: str = ""  # name of the mark that records its use, or "" for a reusable token


@dataclass(frozen=True, slots=True)
class Issued:
    """Signed token and its expiry time in seconds since 1970."""

    value: str
    expires_at: int


class AccessTokens(ExtensionState):
    """Issuer and verifier of access tokens in one ingress replica."""

    def __init__(self, keyring: Secrets, voices: Voices, clock: Callable[[], float]) -> None:
        """`clock` returns seconds since 1970."""
        self._keyring, self._voices, self._clock = keyring, voices, clock
        self._swept_s = float("-inf")
        self._sweeping: asyncio.Task[None] | None = None

    def issue(
        self, key_id: str, purpose: str, *, lifetime_s: int, is_single_use: bool, session: Mapping[str, object]
    ) -> Issued:
        """Issue a token. Raises NoSecrets if there is no secret, or no store for a single-use token."""
        if is_single_use and self._voices.store is None:
            raise NoSecrets(
                "Single-use tokens require a store that all ingress replicas share. Set api.voices.store to a bucket "
                "(docs/voices.md), or request a token without single_use."
            )
        expires_at = int(self._clock()) + lifetime_s
        once = secrets.token_hex(16) if is_single_use else ""
        return Issued(self._keyring.sign(asdict(Claims(key_id, purpose, expires_at, session, once))), expires_at)

    def grant(self, credential: str, scope: Scope) -> Granted | None:
        if not credential.startswith(PREFIX):
            return None
        token = Claims(**self._keyring.read(credential))
        purpose, method = PURPOSES.get(token.purpose), scope.get("method", "WS")
        if token.expires_at <= self._clock():
            raise Unauthorized("The access token has expired. Issue a new one.")
        if purpose is None or not purpose.fits(method, scope["path"]):
            label = token.purpose if purpose is None else purpose.label
            raise Unauthorized(f"The access token is for {label}, not for {method} {scope['path'][:80]}.")
        return Granted(token.key, token.session, partial(self._spend, token) if token.once else None)

    async def _spend(self, token: Claims) -> None:
        """Mark a token as used. Raises Unauthorized if a request has already used the token, and StoreFailed."""
        if not await self._voices.aside(self._voices.files().create, _MARKS + token.once):
            raise Unauthorized("This single-use access token was already used. Issue one for each connection.")

    def follow(self) -> None:
        """Delete the marks of old tokens once an hour."""
        if self._voices.store is not None and time.monotonic() - self._swept_s > _SWEEP_S:
            self._swept_s = time.monotonic()
            self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        try:
            await self._voices.aside(self._remove_old)
        except TalkrayError as error:
            logger.warning("marks of used access tokens cannot be deleted; the server retries in an hour: %s", error)

    def _remove_old(self) -> None:
        """Delete old marks. Their age is measured by the store's clock. Raises StoreFailed."""
        store = self._voices.files()
        before_s = store.now_s() - _OLD_S
        old = [meta["path"] for meta in store.listed(_MARKS) if meta["last_modified"].timestamp() < before_s]
        store.delete(*old)
