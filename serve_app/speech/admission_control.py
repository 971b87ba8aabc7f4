"""Admission control, which accepts or rejects speech requests.

Each replica also limits its own queue, but cannot see those of other replicas. An ingress sees each of its requests
from arrival to first audio, so it can measure how long requests wait for a replica.
"""

import math
import time
from collections import deque
from collections.abc import Callable

from deployments.errors import NotReady, Overloaded, Starting
from deployments.limits import Rate, StreamLimit
from deployments.serving import metrics
from serve_app.config import AdmissionSettings
from serve_app.speech.model_state import ModelState, ModelStatus

# The usual time to first audio is the minimum of the last _LATEST values, or _USUAL_S before the first measurement.
_LATEST = 50
_USUAL_S = 1.0
# How to raise each limit, keyed by the reason for rejection.
_MORE_REPLICAS = "add more or faster replicas"
_REMEDIES = {
    "streams": "raise api.admission.max_streams ({settings.max_streams})",
    "pauses": f"more streams would pause during playback: {_MORE_REPLICAS}",
    "line": f"{_MORE_REPLICAS}, or raise api.admission.max_line_s ({{settings.max_line_s:g}})",
    "late": f"{_MORE_REPLICAS}, or raise api.admission.max_wait_s ({{settings.max_wait_s:g}})",
}


class AdmissionControl:
    """Admission control of one model at one ingress replica. Counts streams and estimates the wait for first audio."""

    def __init__(
        self,
        settings: AdmissionSettings,
        *,
        is_running: Callable[[], bool],
        state: Callable[[], ModelState],
        model: str,
    ) -> None:
        """Create the admission control. `is_running`, `state` and `model` are those of SpeechModel."""
        self.settings, self.is_running, self.state, self.model = settings, is_running, state, model
        self.num_streams = 0
        self.num_speaking = 0  # streams whose first audio has arrived
        # Arrival time and client of each waiting request, oldest first. Requests whose recording has yet to be read,
        # and clients that are still writing their text, are left out, because the pools do not cause their wait.
        self._waiting: dict[object, tuple[float, str]] = {}
        self._limit = StreamLimit(least=settings.min_streams)
        self._starts = Rate()
        self._waits_s: deque[float] = deque(maxlen=_LATEST)
        self._heard_s = -math.inf  # time of the latest audio
        self._stopped_s = -math.inf  # last time at which no pool was running

    def check(self, client: str) -> None:
        """Raise Overloaded or NotReady if this client's request would be rejected now, and count the rejection."""
        if not self._runs():
            self._waiting.clear()  # these requests wait for the pool to start, not for a free replica
        reason = self.refusal_reason(client)
        if reason is not None:
            raise self.refusal(reason)

    def refusal_reason(self, client: str) -> str | None:
        """Return the reason for rejecting a request from this client now, or None if it would be admitted."""
        if self.num_streams >= self.settings.max_streams:
            return "streams"
        if not self._runs():
            return "starting" if self.state().status is ModelStatus.FAILED else None
        if not self._limit.has_room(self.num_streams):
            return "pauses"
        longest_s = self._usual_s + self.settings.max_line_s
        since_s = self._line_since_s(client)
        now_s = time.monotonic()
        is_long = now_s - since_s > longest_s
        # If no audio arrives while requests wait, a replica may have died unnoticed. `max_wait_s` bounds this wait.
        has_audio = now_s - max(since_s, self._heard_s) <= longest_s
        return "line" if is_long and has_audio else None

    def _runs(self) -> bool:
        is_running = self.is_running()
        if not is_running:
            self._stopped_s = time.monotonic()
        return is_running

    def has_run_since(self, came_s: float) -> bool:
        """Return whether replicas are running now and were running at every request since `came_s`."""
        return self.is_running() and self._stopped_s < came_s

    def _line_since_s(self, client: str) -> float:
        """Return the arrival time of the oldest waiting request that counts against this client, or inf.

        All of the client's own requests count. Among other clients' requests, the oldest does not count, because its
        long wait may be due to its text. If the queue is too long for everyone, the second-oldest client has waited
        nearly as long.
        """
        oldest: dict[str, float] = {}
        for since_s, whose in self._waiting.values():
            oldest.setdefault(whose, since_s)
        own_s = oldest.pop(client, math.inf)
        others_s = sorted(oldest.values())[1:2]
        return min(own_s, *others_s, math.inf)

    @property
    def _usual_s(self) -> float:
        """Time to first audio when no request is waiting."""
        return min(self._waits_s, default=_USUAL_S)

    def join_line(self, ticket: object, client: str) -> None:
        """Count a request, identified by `ticket`, as waiting for a free replica."""
        self._waiting[ticket] = time.monotonic(), client

    def leave_line(self, ticket: object) -> None:
        """Count the request as no longer waiting. Unknown tickets are ignored."""
        self._waiting.pop(ticket, None)

    def count_start(self, wait_s: float | None) -> None:
        """Count a waiting request's first audio. `wait_s`: how long it waited, or None if its client was writing."""
        self._starts.count(time.monotonic())
        if wait_s is not None:
            self._waits_s.append(wait_s)

    def count_audio(self) -> None:
        """Record that a stream's audio has arrived."""
        self._heard_s = time.monotonic()

    def count_chunk(self, *, late: bool) -> None:
        """Record that a chunk was sent. A `late` chunk lowers the stream limit."""
        self._limit.count_chunk(late=late, streams=self.num_streams, now_s=time.monotonic())

    def add_stream(self) -> None:
        """Count a new stream, before its first audio."""
        self._count(+1)

    def begin_speaking(self) -> None:
        """Count the first audio of a stream."""
        self.num_speaking += 1

    def remove_stream(self, *, was_speaking: bool) -> None:
        """Stop counting a stream that has ended."""
        if was_speaking:
            self.num_speaking -= 1
        self._count(-1)

    def refusal(self, reason: str) -> Exception:
        """Return the error for `reason`, and count the rejection."""
        metrics.REFUSALS.record(1, reason=reason, model=self.model)
        if reason == "starting":
            return self._starting()
        after_s = self._starts.retry_after_s(len(self._waiting), time.monotonic())
        num_waiting = self.num_streams - self.num_speaking
        load = f"active streams: {self.num_speaking}, waiting for first audio: {num_waiting}"
        remedy = _REMEDIES[reason].format(settings=self.settings)
        return Overloaded(f"The server is at its limit ({load}); {remedy}.", after_s)

    def _starting(self) -> NotReady:
        state = self.state()
        if state.ready_in_s is None:
            return NotReady()
        name = f"The model {self.model}" if self.model else "The model"
        percent = "" if state.percent is None else f", {state.percent} %"
        failed = state.status is ModelStatus.FAILED
        how = "its start failed, see /v1/models for the reason" if failed else f"{state.status}{percent}"
        return Starting(f"{name} is not ready: {how}.", state.ready_in_s)

    async def release_place(self) -> None:
        """Stop counting a stream while its client does not read."""
        self.remove_stream(was_speaking=True)

    def reacquire_place(self) -> None:
        """Resume counting the stream, regardless of limits, because its client has resumed reading."""
        self.begin_speaking()
        self.add_stream()

    def _count(self, change: int) -> None:
        self.num_streams += change
        metrics.STREAMS.record(self.num_streams, model=self.model)
        metrics.ROOM.record(self.num_streams / self.settings.max_streams, model=self.model)
