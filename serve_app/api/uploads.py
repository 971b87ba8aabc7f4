"""The bodies of requests as they arrive: few large ones at once, and none that stalls while others wait."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deployments.errors import Overloaded
from deployments.serving import metrics
from serve_app.api.callers import FairShare

# Bodies that may hold a recording: so many are taken in at once, each until it is decoded; the others wait.
MAX_UPLOADS = 3  # each takes up to 100 MB
_SMALL_BYTES = 128 << 10  # of a body without one
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
        """So much is there in all."""
        if num_bytes - self._num_bytes >= _LEAST_BYTES:
            self._num_bytes, self._since_s = num_bytes, time.monotonic()

    @property
    def is_stalled(self) -> bool:
        return time.monotonic() - self._since_s > _STALL_S


class Uploads:
    """Places for large bodies. One that stalls while others wait is ended: its sender may hold a place for nothing."""

    def __init__(self) -> None:
        self._places = FairShare(MAX_UPLOADS)
        self._taken: list[Upload] = []
        self._waiting: list[Upload] = []
        self._changed = asyncio.Event()

    async def take(self, upload: "Upload") -> None:
        """A place for it, in turn. Raises Overloaded where that takes long."""
        self._waiting.append(upload)
        try:
            async with asyncio.timeout(_UPLOAD_WAIT_S):
                while self._next() is not upload:
                    for other in self._taken:
                        other.end_if_stalled()
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), _LOOK_S)
            self._places.take(upload.caller, 1)
            self._taken.append(upload)
        except TimeoutError:
            metrics.refused("uploads")
            raise Overloaded(f"{MAX_UPLOADS} large bodies are being taken in already.", _RETRY_AFTER_S) from None
        finally:
            self._waiting.remove(upload)
            self._changed.set()

    def give_back(self, upload: "Upload") -> None:
        self._taken.remove(upload)
        self._places.give_back(upload.caller, 1)
        self._changed.set()

    def _next(self) -> "Upload | None":
        return next((upload for upload in self._waiting if self._places.has(upload.caller, 1)), None)


class Upload:
    """The body of one request. A large one takes one of the places for bodies."""

    def __init__(self, uploads: Uploads, caller: str) -> None:
        """`caller` is the name of its sender."""
        self.caller = caller
        self.is_stalled = False  # and was ended, as others waited
        self._uploads, self._is_large = uploads, False
        self._pace = Pace()
        self._limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def arriving(self, within_s: float) -> AsyncIterator[None]:
        """The parts as they come. Raises TimeoutError after `within_s`, or as soon as it stalls while others wait."""
        async with asyncio.timeout(within_s) as self._limit:
            try:
                yield
            finally:
                self._limit = None

    async def grow(self, num_bytes: int) -> None:
        """`num_bytes` of the body have come: return once more may come. Raises Overloaded where that takes long."""
        self._pace.come(num_bytes)
        if self._is_large or num_bytes <= _SMALL_BYTES:
            return
        await self._uploads.take(self)
        self._is_large, self._pace = True, Pace()

    def end_if_stalled(self) -> None:
        if self._limit is not None and not self.is_stalled and self._pace.is_stalled:
            self.is_stalled = True
            self._limit.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        if self._is_large:
            self._is_large = False
            self._uploads.give_back(self)
