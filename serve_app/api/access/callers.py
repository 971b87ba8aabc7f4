"""Callers: what each may see, and their limits: requests, streams, and fair sharing of resources among all."""

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from deployments.errors import Overloaded
from deployments.serving import metrics

_MINUTE_S = 60.0
# How to raise each limit, keyed by the reason for rejection.
_REMEDIES = {
    "key": "`talkray key limit` raises the limits of a key",
    "client": "api.admission sets the limits (client_requests_per_minute, client_streams)",
}
# Value of `Retry-After` in seconds if a client has too many streams; one of them may have ended by then.
_STREAM_S = 1.0
# Maximum number of meters for keys, and for addresses. Above this, the oldest meter without a stream is dropped.
_MOST_METERS = 10_000


@dataclass(frozen=True, slots=True)
class Visitor:
    """Caller that may access either its own voices or all voices.

    `name` is the name of its API key: None without a key, and "" if the server requires no keys.
    """

    name: str | None
    sees_all: bool = False


STRANGER = Visitor(None)
EVERYBODY = Visitor("", sees_all=True)
# Caller of the current task's request, set by access control, jobs and the command line. A context variable cannot be
# forgotten, whereas an argument would have to be passed through all dialects, and omitting it could expose a voice to a
# stranger. A task that does not set it sees no voices.
VISITOR: ContextVar[Visitor] = ContextVar("visitor", default=STRANGER)


class Meter:
    """Usage of one key or address. `reason` labels its rejections in metrics; `holder` names the client in messages."""

    def __init__(self, reason: str, holder: str) -> None:
        self.requests_per_minute: float | None = None  # also the largest burst; None: no limit
        self.max_streams: int | None = None
        self.num_streams = 0
        self._reason, self._holder = reason, holder
        self._tokens = math.inf  # requests left in the token bucket, at most `requests_per_minute`
        self._counted_s = time.monotonic()

    def count_request(self) -> None:
        """Count a request. Raises Overloaded if the caller has exceeded its requests per minute."""
        per_minute = self.requests_per_minute
        if per_minute is None:
            return
        now_s, per_s = time.monotonic(), per_minute / _MINUTE_S
        self._tokens = min(max(1.0, per_minute), self._tokens + (now_s - self._counted_s) * per_s)
        self._counted_s = now_s
        if self._tokens < 1.0:
            raise self._refusal(f"may make {per_minute:g} requests per minute", (1.0 - self._tokens) / per_s)
        self._tokens -= 1.0

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream while the context is open. Raises Overloaded if the caller has too many open streams."""
        most = self.max_streams
        if most is not None and self.num_streams >= most:
            raise self._refusal(f"may have {most} streams open at once", _STREAM_S)
        self.num_streams += 1
        try:
            yield
        finally:
            self.num_streams -= 1

    def _refusal(self, limit: str, retry_after_s: float) -> Overloaded:
        metrics.REFUSALS.record(1, reason=self._reason)
        return Overloaded(f"{self._holder} {limit}; {_REMEDIES[self._reason]}.", retry_after_s)


class Meters:
    """Meters for all keys or all addresses."""

    def __init__(self, reason: str, holder: str) -> None:
        self._reason, self._holder = reason, holder
        self._meters: dict[str, Meter] = {}

    def of(self, name: str, requests_per_minute: float | None, *, max_streams: int | None) -> Meter:
        """Return the meter for one key or address. An existing meter keeps its counts and gets the new limits."""
        meter = self._meters.get(name)
        if meter is None:
            if len(self._meters) >= _MOST_METERS:
                idle = next((key for key, other in self._meters.items() if not other.num_streams), "")
                self._meters.pop(idle, None)
            meter = self._meters[name] = Meter(self._reason, self._holder)
        meter.requests_per_minute, meter.max_streams = requests_per_minute, max_streams
        return meter


class FairShare:
    """Slots or bytes shared by all callers in a process.

    Each claim must leave at least as much free as the caller will then hold, so other callers always get a share.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: Counter[str] = Counter()  # by caller; callers that hold nothing have no entry

    def has(self, caller: str, amount: int) -> bool:
        """Return whether this caller may claim `amount`."""
        return self._held[caller] + amount <= self._size - self._held.total()

    def claim(self, caller: str, amount: int) -> bool:
        """Claim `amount` for this caller if it is available. Return whether the claim succeeded."""
        if not self.has(caller, amount):
            return False
        self._held[caller] += amount
        return True

    def release(self, caller: str, amount: int) -> None:
        self._held[caller] -= amount
        if not self._held[caller]:
            del self._held[caller]


@dataclass(frozen=True, slots=True)
class Granted:
    """API key represented by an extension's credential, such as an access token, for one request."""

    key_id: str
    session: Mapping[str, object]  # session settings that the credential sets for a WebSocket
    spend: Callable[[], Awaitable[None]] | None  # called after admission; raises if the credential was already used


class Caller:
    """Client that sent a request, identified by its address and, if keys are enabled, its API key. Both sets of limits
    apply.

    `name` is unique to the key, or to the address if the client has no key.
    """

    key_id: str | None = None  # id of the API key; None: the client has no key
    granted: Granted | None = None  # set if an extension's credential replaces the key

    def __init__(self, name: str, *meters: Meter, visitor: Visitor, check: Callable[[], None] = lambda: None) -> None:
        """Create a caller. `visitor` selects the stored voices that the caller may see. `check` raises if its key has
        been revoked.
        """
        self.name, self.visitor = name, visitor
        self._meters = meters
        self._check = check

    def count_request(self) -> None:
        """Count a request. Raises Overloaded, or Unauthorized if the key has been revoked."""
        self._check()
        for meter in self._meters:
            meter.count_request()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream while the context is open. Raises Overloaded."""
        with ExitStack() as streams:
            for meter in self._meters:
                streams.enter_context(meter.stream())
            yield
