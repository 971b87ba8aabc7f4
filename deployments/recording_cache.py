"""Cache for data computed from reference recordings, because clients repeatedly clone the same voice.

When a stored voice is deleted, its data is dropped, because a voice's speaker vectors and codes are biometric data.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")

VOICE_BYTES = 16  # leading bytes of a stored recording's key, which identify the voice and its version
_MOST_FORGOTTEN = 10_000


@dataclass(frozen=True, slots=True)
class Lookups:
    """Counts of cache hits and misses."""

    hits: int = 0
    misses: int = 0


class RecordingCache(Generic[T]):
    """LRU cache for results by recording, limited to a number of bytes. All methods are thread-safe.

    Callers share the results and must not modify them.
    """

    def __init__(self, *, max_bytes: int, size: Callable[[T], int] = attrgetter("nbytes")) -> None:
        self._max_bytes, self._size = max_bytes, size
        self._results: OrderedDict[bytes, T] = OrderedDict()
        self._held = 0
        self._forgotten: dict[bytes, None] = {}  # most recently deleted voices; their results may still be computing
        self._lock = Lock()
        self._hits = self._misses = 0

    def get(self, key: bytes, compute: Callable[[], T]) -> T:
        """Return the result for a recording. On a cache miss, call `compute` and store its result."""
        result = self.find(key)
        with self._lock:
            self._hits += result is not None
            self._misses += result is None
        if result is None:
            result = compute()  # concurrent misses compute the result twice, because waiting would be slower
            self.put(key, result)
        return result

    def find(self, key: bytes) -> T | None:
        """Return the cached result for a recording, or None. Does not update hit statistics."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
            return self._results.get(key)

    def put(self, key: bytes, result: T) -> None:
        """Store a result that was computed elsewhere, replacing any older result for the same key."""
        size = self._size(result)
        if size > self._max_bytes:
            return
        with self._lock:
            if key[:VOICE_BYTES] in self._forgotten:
                return
            if key in self._results:
                self._held -= self._size(self._results.pop(key))
            self._results[key] = result
            self._held += size
            while self._held > self._max_bytes:
                _, oldest = self._results.popitem(last=False)
                self._held -= self._size(oldest)

    def forget(self, voices: Iterable[bytes]) -> int:
        """Drop all results for `voices`, and reject later results for them. Returns the number of results dropped.

        Each voice is the first VOICE_BYTES of a key.
        """
        with self._lock:
            self._forgotten.update(dict.fromkeys(voices))
            while len(self._forgotten) > _MOST_FORGOTTEN:
                del self._forgotten[next(iter(self._forgotten))]
            over = [key for key in self._results if key[:VOICE_BYTES] in self._forgotten]
            for key in over:
                self._held -= self._size(self._results.pop(key))
        return len(over)

    def take_lookups(self) -> Lookups:
        with self._lock:
            lookups, self._hits, self._misses = Lookups(self._hits, self._misses), 0, 0
        return lookups
