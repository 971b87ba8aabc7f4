"""Limits on request bodies in transit. Only a few large bodies are read at once, and stalled ones may be aborted."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deployments.errors import Overloaded
from deployments.serving import metrics
from serve_app.api.access.callers import FairShare

# Maximum number of large bodies, which may contain recordings, that are read at once. Each body keeps its slot until
# its recording has been decoded. Other bodies wait.
MAX_UPLOADS = 3  # each body needs up to 100 MB
_SMALL_BYTES = 128 << 10  # larger bodies may contain a recording
_UPLOAD_WAIT_S = 10.0
# A body has stalled if fewer than this many bytes arrive in this time. At this rate, 16 MiB would take eight minutes.
_LEAST_BYTES, _STALL_S = 64 << 10, 2.0
_LOOK_S = 0.25  # interval at which a waiting body checks for stalled ones
_RETRY_AFTER_S = 1.0


class Pace:
    """Tracks the progress of an upload to detect stalls."""

    def __init__(self) -> None:
        self._num_bytes, self._since_s = 0, time.monotonic()

    def come(self, num_bytes: int) -> None:
        """Update the total number of received bytes."""
        if num_bytes - self._num_bytes >= _LEAST_BYTES:
            self._num_bytes, self._since_s = num_bytes, time.monotonic()

    @property
    def is_stalled(self) -> bool:
        return time.monotonic() - self._since_s > _STALL_S


class Uploads:
    """Slots for large bodies. Stalled bodies are aborted if others are waiting for a slot."""

    def __init__(self) -> None:
        self._places = FairShare(MAX_UPLOADS)
        self._claimed: list[Upload] = []
        self._waiting: list[Upload] = []
        self._changed = asyncio.Event()

    async def claim(self, upload: "Upload") -> None:
        """Wait until `upload` gets a slot, in order of arrival. Raises Overloaded after _UPLOAD_WAIT_S."""
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
            raise Overloaded(f"The server is already receiving {MAX_UPLOADS} large bodies.", _RETRY_AFTER_S) from None
        finally:
            self._waiting.remove(upload)
            self._changed.set()

    def release(self, upload: "Upload") -> None:
        self._claimed.remove(upload)
        self._places.release(upload.caller, 1)
        self._changed.set()

    def _next(self) -> "Upload | None":
        return next((upload for upload in self._waiting if self._places.has(upload.caller, 1)), None)


class Upload:
    """Body of one request. A large body takes one of the slots of `Uploads`."""

    def __init__(self, uploads: Uploads, caller: str) -> None:
        """Create an upload from the client named `caller`."""
        self.caller = caller
        self.is_stalled = False  # whether the upload was aborted because it stalled
        self._uploads = uploads
        self._is_large = False
        self._pace = Pace()
        self._limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def time_limit(self, within_s: float) -> AsyncIterator[None]:
        """Limit the time for reading the body in this context. Raises TimeoutError after `within_s`, or if the body
        stalls while other bodies wait.
        """
        async with asyncio.timeout(within_s) as self._limit:
            try:
                yield
            finally:
                self._limit = None

    async def wait_for_slot(self, num_bytes: int) -> None:
        """Wait until more of the body may be read. `num_bytes` is the total received up to now. Raises Overloaded on a
        timeout.
        """
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
            self._uploads.release(self)
