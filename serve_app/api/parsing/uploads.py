"""The bodies of requests as they arrive. Few large ones are read at once, and one that stalls may be ended."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deployments.errors import Overloaded
from deployments.serving import metrics
from serve_app.api.access.callers import FairShare

# How many bodies that may hold a recording are read at once. Each holds its place until it is decoded; others wait.
MAX_UPLOADS = 3  # each takes up to 100 MB
_SMALL_BYTES = 128 << 10  # a larger body may hold a recording
_UPLOAD_WAIT_S = 10.0
# A body has stalled where less than this comes in this time: 16 MiB would take eight minutes.
_LEAST_BYTES, _STALL_S = 64 << 10, 2.0
_LOOK_S = 0.25  # how often a waiting body looks whether another has stalled
_RETRY_AFTER_S = 1.0


class Pace:
    """Whether a body still comes, or has stalled."""

    def __init__(self) -> None:
        self._num_bytes, self._since_s = 0, time.monotonic()

    def come(self, num_bytes: int) -> None:
        """`num_bytes` have come in all."""
        if num_bytes - self._num_bytes >= _LEAST_BYTES:
            self._num_bytes, self._since_s = num_bytes, time.monotonic()

    @property
    def is_stalled(self) -> bool:
        return time.monotonic() - self._since_s > _STALL_S


class Uploads:
    """Places for large bodies. A body that stalls while others wait is ended, because it holds a place for nothing."""

    def __init__(self) -> None:
        self._places = FairShare(MAX_UPLOADS)
        self._claimed: list[Upload] = []
        self._waiting: list[Upload] = []
        self._changed = asyncio.Event()

    async def claim(self, upload: "Upload") -> None:
        """Waits until `upload` gets a place, in turn. Raises Overloaded if that takes long."""
        self._waiting.append(upload)
        try:
            async with asyncio.timeout(_UPLOAD_WAIT_S):
                while self._next() is not upload:
                    for claimed in self._claimed:
                        claimed.end_if_stalled()
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), _LOOK_S)
            self._places.claim(upload.caller, 1)
            self._claimed.append(upload)
        except TimeoutError:
            metrics.REFUSALS.record(1, reason="uploads")
            raise Overloaded(f"{MAX_UPLOADS} large bodies are being received already.", _RETRY_AFTER_S) from None
        finally:
            self._waiting.remove(upload)
            self._changed.set()

    def give_back(self, upload: "Upload") -> None:
        self._claimed.remove(upload)
        self._places.give_back(upload.caller, 1)
        self._changed.set()

    def _next(self) -> "Upload | None":
        return next((upload for upload in self._waiting if self._places.has(upload.caller, 1)), None)


class Upload:
    """The body of one request. A large one takes one of the places for bodies."""

    def __init__(self, uploads: Uploads, caller: str) -> None:
        """`caller` is the name of its sender."""
        self.caller = caller
        self.is_stalled = False  # whether it was ended because it stalled
        self._uploads = uploads
        self._is_large = False
        self._pace = Pace()
        self._limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def arriving(self, within_s: float) -> AsyncIterator[None]:
        """The body is read inside. Raises TimeoutError after `within_s`, or as soon as it stalls while others wait."""
        async with asyncio.timeout(within_s) as self._limit:
            try:
                yield
            finally:
                self._limit = None

    async def grow(self, num_bytes: int) -> None:
        """Returns once more of the body may be read; `num_bytes` have come. Raises Overloaded if that takes long."""
        self._pace.come(num_bytes)
        if self._is_large or num_bytes <= _SMALL_BYTES:
            return
        await self._uploads.claim(self)
        self._is_large = True
        self._pace = Pace()

    def end_if_stalled(self) -> None:
        if self._limit is not None and not self.is_stalled and self._pace.is_stalled:
            self.is_stalled = True
            self._limit.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        if self._is_large:
            self._is_large = False
            self._uploads.give_back(self)
