"""Access tokens of one ingress replica: issued for a key and a purpose, read with each request, spent in the store."""

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
from serve_app.extension import Opened
from serve_app.extensions.access_tokens.signing import PREFIX, NoSecrets, Secrets
from serve_app.extensions.voices.library import Voices

logger = logging.getLogger(__name__)

MOST_S = 3600
_MARKS = "tokens/"
_SWEEP_S = 3600.0
_OLD_S = 2 * MOST_S  # by then a token has expired by every clock of the cluster


@dataclass(frozen=True, slots=True)
class Purpose:
    """The requests that a token is valid for."""

    label: str  # in messages
    places: tuple[str, ...]  # methods and paths; WS means a WebSocket

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
    "deepgram": Purpose(
        "Deepgram's speech", tuple(f"{method} /v{number}/speak" for number in (1, 2) for method in ("POST", "WS"))
    ),
    "cartesia": Purpose("Cartesia's speech", ("POST /tts/bytes", "POST /tts/sse", "WS /tts/websocket")),
}


@dataclass(frozen=True, slots=True)
class Claims:
    """The signed content of a token."""

    key: str  # id of the API key that issued it
    purpose: str
    expires_at: int  # seconds since 1970
    session: Mapping[str, object] = field(default_factory=dict)  # settings for a socket
    once: str = ""  # the name of its mark in the store; "": it can be used repeatedly


@dataclass(frozen=True, slots=True)
class Issued:
    """A new token."""

    value: str
    expires_at: int


class AccessTokens(Opened):
    """Issues and reads tokens."""

    def __init__(self, keyring: Secrets, voices: Voices, clock: Callable[[], float]) -> None:
        """`clock`: seconds since 1970."""
        self._keyring, self._voices, self._clock = keyring, voices, clock
        self._swept_s = float("-inf")
        self._sweeping: asyncio.Task[None] | None = None

    def issue(
        self, key_id: str, purpose: str, *, lifetime_s: int, is_single_use: bool, session: Mapping[str, object]
    ) -> Issued:
        """Raises NoSecrets, also for a single-use token if there is no shared store."""
        if is_single_use and self._voices.store is None:
            raise NoSecrets(
                "A token that works once needs a store that all ingress replicas share. Set api.voices.store to a "
                "bucket (docs/voices.md), or ask for a token that works until it expires."
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
        """Raises Unauthorized if any replica has spent it before, and StoreFailed."""
        if not await self._voices.aside(self._voices.files().create, _MARKS + token.once):
            raise Unauthorized("The access token has been used: it works once. Issue a new one for each connection.")

    def follow(self) -> None:
        """Remove the marks of old tokens now and then."""
        if self._voices.store is not None and time.monotonic() - self._swept_s > _SWEEP_S:
            self._swept_s = time.monotonic()
            self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        try:
            await self._voices.aside(self._remove_old)
        except TalkrayError as error:
            logger.warning("marks of used access tokens stay for another hour: %s", error)

    def _remove_old(self) -> None:
        """Age is measured by the store's own clock. Raises StoreFailed."""
        store = self._voices.files()
        before_s = store.now_s() - _OLD_S
        old = [meta["path"] for meta in store.listed(_MARKS) if meta["last_modified"].timestamp() < before_s]
        store.delete(*old)
