"""Whether a model speaks, and the progress of its start."""

from dataclasses import dataclass
from enum import StrEnum

from deployments.serving.reports import Start

_USUAL_START_S = 25.0  # of a talker whose start was never measured: on a GPU, with compiled kernels
_NEARLY = 99  # percent, the maximum until the model is ready
_LONGEST_REASON = 300


class ModelStatus(StrEnum):
    """Whether a model speaks."""

    READY = "ready"
    LOADING = "loading"
    ASLEEP = "asleep"  # off its GPU for lack of requests, and the next one brings it back in seconds
    AT_ZERO = "at zero"  # no replicas for lack of requests; the next request starts one
    FAILED = "failed"  # its latest start failed; Serve tries again


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model as its pools are now."""

    status: ModelStatus
    stage: str = ""  # the current stage of its start, or why it failed
    percent: int | None = None  # progress of a start: the share of the time that the last start took
    ready_in_s: float | None = None

    @classmethod
    def of(cls, start: Start | None, *, wanted: int, running: bool, now_s: float) -> "ModelState":
        """The state, from the talker replicas that Serve wants and the note of the latest start."""
        usual_s = (start and (start.took_s or start.usual_s)) or _USUAL_START_S
        if running:
            return cls(ModelStatus.ASLEEP if start is not None and start.is_asleep else ModelStatus.READY)
        if not wanted:
            return cls(ModelStatus.AT_ZERO, ready_in_s=usual_s)
        if start is None or start.took_s is not None:  # Serve is looking for a place
            return cls(ModelStatus.LOADING, "waiting for a place", percent=0, ready_in_s=usual_s)
        if start.failed is not None:
            return cls(ModelStatus.FAILED, start.failed[:_LONGEST_REASON], ready_in_s=usual_s)
        spent_s = max(0.0, now_s - start.began_s)
        percent = min(_NEARLY, int(100 * spent_s / usual_s))
        return cls(ModelStatus.LOADING, start.stage, percent=percent, ready_in_s=max(1.0, usual_s - spent_s))

    def as_json(self) -> dict[str, object]:
        """The fields of the state for JSON."""
        fields = {"state": self.status, "percent": self.percent, "stage": self.stage or None}
        return {name: value for name, value in fields.items() if value is not None}

    def __str__(self) -> str:
        how = "" if self.percent is None else f" ({self.percent} %)"
        return f"{self.status}{how}" + (f": {self.stage}" if self.stage else "")


def ready() -> ModelState:
    """The state of a pool that cannot go to zero."""
    return ModelState(ModelStatus.READY)
