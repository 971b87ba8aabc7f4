"""A model's state and startup progress."""

from dataclasses import dataclass
from enum import StrEnum

from deployments.serving.reports import Start

_USUAL_START_S = 25.0  # assumed until measured: a talker on a GPU, with compiled kernels
_NEARLY = 99  # highest percentage shown before the model is ready
_LONGEST_REASON = 300


class ModelStatus(StrEnum):
    """Availability of a model."""

    READY = "ready"
    LOADING = "loading"
    ASLEEP = "asleep"  # unloaded from the GPU while idle; the next request reloads it in seconds
    AT_ZERO = "at zero"  # no replicas while idle; the next request starts one
    FAILED = "failed"  # the latest start failed; Serve retries


@dataclass(frozen=True, slots=True)
class ModelState:
    """Current state of a model's pools."""

    status: ModelStatus
    stage: str = ""  # current startup stage, or the reason for a failure
    percent: int | None = None  # elapsed time as a share of the previous start's duration
    ready_in_s: float | None = None

    @classmethod
    def of(cls, start: Start | None, *, wanted: int, running: bool, now_s: float) -> "ModelState":
        """Derive the state from the number of talker replicas that Serve wants and the latest startup report."""
        usual_s = (start and (start.took_s or start.usual_s)) or _USUAL_START_S
        if running:
            return cls(ModelStatus.ASLEEP if start is not None and start.is_asleep else ModelStatus.READY)
        if not wanted:
            return cls(ModelStatus.AT_ZERO, ready_in_s=usual_s)
        if start is None or start.took_s is not None:  # Serve is searching for a node with free resources
            return cls(ModelStatus.LOADING, "waiting for resources", percent=0, ready_in_s=usual_s)
        if start.failed is not None:
            return cls(ModelStatus.FAILED, start.failed[:_LONGEST_REASON], ready_in_s=usual_s)
        spent_s = max(0.0, now_s - start.began_s)
        percent = min(_NEARLY, int(100 * spent_s / usual_s))
        return cls(ModelStatus.LOADING, start.stage, percent=percent, ready_in_s=max(1.0, usual_s - spent_s))

    def as_json(self) -> dict[str, object]:
        """Return the state's fields for use in JSON."""
        fields = {"state": self.status, "percent": self.percent, "stage": self.stage or None}
        return {name: value for name, value in fields.items() if value is not None}

    def __str__(self) -> str:
        how = "" if self.percent is None else f" ({self.percent} %)"
        return f"{self.status}{how}" + (f": {self.stage}" if self.stage else "")


def ready() -> ModelState:
    """Return the state of a pool that never scales to zero."""
    return ModelState(ModelStatus.READY)
