"""A caller, and how much of the server it may use: requests, streams, and a share of what all callers use."""

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from deployments.errors import Overloaded
from deployments.serving import metrics
from serve_app.visitor import Visitor

_MINUTE_S = 60.0
# The settings that raise a limit, by the reason of a refusal.
_REMEDIES = {
    "key": "a key with higher limits (`talkray key create`) has more",
    "client": "api.admission has the limits (client_requests_per_minute, client_streams)",
}
# A client that holds a stream is asked to come back when it may have ended.
_STREAM_S = 1.0
# How many keys, and how many addresses, are remembered. Then the oldest one without a stream is forgotten.
_MOST_METERS = 10_000


class Meter:
    """The use of one key or one address. `reason` names its refusals in metrics, `holder` names it in messages."""

    def __init__(self, reason: str, holder: str) -> None:
        self.requests_per_minute: float | None = None  # in bursts of up to as many; None: no limit
        self.max_streams: int | None = None
        self.num_streams = 0
        self._reason, self._holder = reason, holder
        self._tokens = math.inf  # requests that may be made at once; refilled steadily, up to `requests_per_minute`
        self._counted_s = time.monotonic()

    def count_request(self) -> None:
        """Count a request. Raises Overloaded if it is one too many in this minute."""
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
        """Count a stream for as long as this holds. Raises Overloaded if it is one too many at once."""
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
    """The meters of all keys, or of all addresses."""

    def __init__(self, reason: str, holder: str) -> None:
        self._reason, self._holder = reason, holder
        self._meters: dict[str, Meter] = {}

    def of(self, name: str, requests_per_minute: float | None, *, max_streams: int | None) -> Meter:
        """The meter of one key or address. It gets the present limits and keeps what it has counted."""
        meter = self._meters.get(name)
        if meter is None:
            if len(self._meters) >= _MOST_METERS:
                idle = next((key for key, other in self._meters.items() if not other.num_streams), "")
                self._meters.pop(idle, None)
            meter = self._meters[name] = Meter(self._reason, self._holder)
        meter.requests_per_minute, meter.max_streams = requests_per_minute, max_streams
        return meter


class FairShare:
    """Places or bytes that the requests of a process share.

    No claim brings a caller above what is free before it, so that other callers find some.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: Counter[str] = Counter()  # by the callers that hold any

    def has(self, caller: str, amount: int) -> bool:
        """Whether `amount` is free for this caller."""
        return self._held[caller] + amount <= self._size - self._held.total()

    def claim(self, caller: str, amount: int) -> bool:
        """Takes `amount` for this caller if it is free. Returns whether it was."""
        if not self.has(caller, amount):
            return False
        self._held[caller] += amount
        return True

    def give_back(self, caller: str, amount: int) -> None:
        self._held[caller] -= amount
        if not self._held[caller]:
            del self._held[caller]


@dataclass(frozen=True, slots=True)
class Granted:
    """The API key that an extension's credential, such as an access token, stands for in one request."""

    key_id: str
    session: Mapping[str, object]  # settings that the credential brings to a socket
    spend: Callable[[], Awaitable[None]] | None  # called once the request is admitted; raises if it was spent before


class Caller:
    """The client that sent a request: its address and, where the server has keys, its key. A request counts for both.

    `name` identifies callers: by the key, without one by the address.
    """

    key_id: str | None = None  # of the API key; None: it has none
    granted: Granted | None = None  # if its key did not come with the request

    def __init__(self, name: str, *meters: Meter, visitor: Visitor, check: Callable[[], None] = lambda: None) -> None:
        """`visitor` determines the voices that it may see. `check` raises if the caller may not ask any more."""
        self.name, self.visitor = name, visitor
        self._meters = meters
        self._check = check

    def count_request(self) -> None:
        """Count a request. Raises Overloaded, and Unauthorized if the key has been revoked since."""
        self._check()
        for meter in self._meters:
            meter.count_request()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream for as long as this holds. Raises Overloaded."""
        with ExitStack() as streams:
            for meter in self._meters:
                streams.enter_context(meter.stream())
            yield
