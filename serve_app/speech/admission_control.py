"""Which requests are let in now, and the error for a request for which there is no room.

The queues of the replicas are bounded too, but no replica knows the queue of another. An ingress sees all its requests
from arrival to first audio, so it knows how long a request waits for a replica.
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

# The usual time to first audio is the least of the latest _LATEST times, or _USUAL_S while there are none.
_LATEST = 50
_USUAL_S = 1.0
# What raises the limit, by the reason of a refusal.
_MORE_REPLICAS = "more or faster replicas raise the limit"
_REMEDIES = {
    "streams": "api.admission.max_streams ({settings.max_streams}) raises the limit",
    "pauses": f"more would be heard with pauses, so {_MORE_REPLICAS}",
    "line": f"{_MORE_REPLICAS}, api.admission.max_line_s ({{settings.max_line_s:g}}) lets more of them wait",
    "late": f"{_MORE_REPLICAS}, api.admission.max_wait_s ({{settings.max_wait_s:g}}) lets them wait longer",
}


class AdmissionControl:
    """Counts the streams of one model at one ingress replica, and estimates how long the line for first audio is."""

    def __init__(
        self,
        settings: AdmissionSettings,
        *,
        is_running: Callable[[], bool],
        state: Callable[[], ModelState],
        model: str,
    ) -> None:
        """`is_running`, `state`, `model`: those of SpeechModel."""
        self.settings, self.is_running, self.state, self.model = settings, is_running, state, model
        self.num_streams = 0
        self.num_speaking = 0  # of these streams: their first audio has come
        # When each waiting request came, and its client, the oldest first. Two kinds are left out, because their wait
        # is not the pools': a recording has to be read, and a client that writes its text may take its time.
        self._waiting: dict[object, tuple[float, str]] = {}
        self._limit = StreamLimit(least=settings.min_streams)
        self._starts = Rate()
        self._waits_s: deque[float] = deque(maxlen=_LATEST)
        self._heard_s = -math.inf  # when audio came last
        self._stopped_s = -math.inf  # when no pool was running

    def check(self, client: str) -> None:
        """Raises Overloaded or NotReady if a request of this client would be refused now, and counts that."""
        if not self._runs():
            self._waiting.clear()  # these requests wait for a start, not for a free replica
        reason = self.would_refuse(client)
        if reason is not None:
            raise self.refusal(reason)

    def would_refuse(self, client: str) -> str | None:
        """Why a request of this client would be refused now; None if it would be let in."""
        if self.num_streams >= self.settings.max_streams:
            return "streams"
        if not self._runs():
            return "starting" if self.state().status is ModelStatus.FAILED else None
        if not self._limit.has_room(self.num_streams):
            return "pauses"
        longest_s = self._usual_s + self.settings.max_line_s
        since_s = self._line_since_s(client)
        now_s = time.monotonic()
        # A line behind which nothing is heard may be a death that is not known yet, and `max_wait_s` bounds that wait.
        silent_s = now_s - max(since_s, self._heard_s)
        return "line" if now_s - since_s > longest_s >= silent_s else None

    def _runs(self) -> bool:
        is_running = self.is_running()
        if not is_running:
            self._stopped_s = time.monotonic()
        return is_running

    def has_run_since(self, came_s: float) -> bool:
        """Whether replicas run, and none of the requests since then found none."""
        return self.is_running() and self._stopped_s < came_s

    def _line_since_s(self, client: str) -> float:
        """When the oldest waiting request came, of the requests that count for this client; inf if none does.

        The client's own requests count. Of the other clients' requests the oldest does not count, because its text
        alone may be the reason for its wait. If the line is too long for all, the next client waits nearly as long.
        """
        oldest: dict[str, float] = {}
        for since_s, whose in self._waiting.values():
            oldest.setdefault(whose, since_s)
        own_s = oldest.pop(client, math.inf)
        others_s = sorted(oldest.values())[1:2]
        return min(own_s, *others_s, math.inf)

    @property
    def _usual_s(self) -> float:
        """The time to first audio when nothing waits."""
        return min(self._waits_s, default=_USUAL_S)

    def join_line(self, ticket: object, client: str) -> None:
        """A request waits from now on for a free replica. Its `ticket` identifies it."""
        self._waiting[ticket] = time.monotonic(), client

    def leave_line(self, ticket: object) -> None:
        """The request waits no longer. It need not have joined the line."""
        self._waiting.pop(ticket, None)

    def count_start(self, wait_s: float | None) -> None:
        """First audio came to a request in the line. `wait_s`: its wait, None if its client was writing."""
        self._starts.count(time.monotonic())
        if wait_s is not None:
            self._waits_s.append(wait_s)

    def count_audio(self) -> None:
        """Audio of a stream came."""
        self._heard_s = time.monotonic()

    def delivered(self, *, late: bool) -> None:
        """A chunk was sent. The limit on streams learns from `late` ones."""
        self._limit.delivered(late=late, streams=self.num_streams, now_s=time.monotonic())

    def add_stream(self) -> None:
        """A stream counts from now on, before its first audio."""
        self._count(+1)

    def begin_speaking(self) -> None:
        """The first audio of a stream came."""
        self.num_speaking += 1

    def remove_stream(self, *, was_speaking: bool) -> None:
        """A stream is over."""
        if was_speaking:
            self.num_speaking -= 1
        self._count(-1)

    def refusal(self, reason: str) -> Exception:
        """The error to raise now: it is counted as a refusal."""
        metrics.REFUSALS.record(1, reason=reason, model=self.model)
        if reason == "starting":
            return self._starting()
        after_s = self._starts.retry_after_s(len(self._waiting), time.monotonic())
        num_waiting = self.num_streams - self.num_speaking
        load = f"being spoken: {self.num_speaking}, waiting for their first audio: {num_waiting}"
        remedy = _REMEDIES[reason].format(settings=self.settings)
        return Overloaded(f"The server is at its limit ({load}); {remedy}.", after_s)

    def _starting(self) -> NotReady:
        state = self.state()
        if state.ready_in_s is None:
            return NotReady()
        name = f"The model {self.model}" if self.model else "The model"
        percent = "" if state.percent is None else f", {state.percent} %"
        failed = state.status is ModelStatus.FAILED
        how = "its start failed, /v1/models says why" if failed else f"{state.status}{percent}"
        return Starting(f"{name} is not ready: {how}.", state.ready_in_s)

    async def give_up_place(self) -> None:
        """A stream that is spoken does not count while its reader takes nothing."""
        self.remove_stream(was_speaking=True)

    def regain_place(self) -> None:
        """The reader takes audio again. Its stream counts, whatever the limits say."""
        self.begin_speaking()
        self.add_stream()

    def _count(self, change: int) -> None:
        self.num_streams += change
        metrics.STREAMS.record(self.num_streams, model=self.model)
        metrics.ROOM.record(self.num_streams / self.settings.max_streams, model=self.model)
