"""Several models behind the one port to speech, each with an admission of its own, and what is known of their state."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from deployments.errors import NotReady
from deployments.protocol import ModelInfo, PcmChunk, SynthesisRequest
from deployments.serving.reports import Start

if TYPE_CHECKING:
    from serve_app.speech.admission import Admission

_USUAL_START_S = 25.0  # of a talker whose start nobody has seen: on a GPU, with compiled kernels
_NEARLY = 99  # per cent, until it is there
_LONGEST_REASON = 300


class ModelStatus(StrEnum):
    """Whether a model speaks."""

    READY = "ready"
    LOADING = "loading"
    AT_ZERO = "at zero"  # for lack of requests, and the next one starts it
    FAILED = "failed"  # its latest start; Serve tries again


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model as its pools are now."""

    status: ModelStatus
    stage: str = ""  # what its start is busy with, or why it failed
    percent: int | None = None  # how far a start is: the share of the time that the last start took
    ready_in_s: float | None = None

    @classmethod
    def of(cls, start: Start | None, *, wanted: int, running: bool, now_s: float) -> "ModelState":
        """From what Serve wants of the talker pool and the note of its latest start."""
        usual_s = (start and (start.took_s or start.usual_s)) or _USUAL_START_S
        if running:
            return cls(ModelStatus.READY)
        if not wanted:
            return cls(ModelStatus.AT_ZERO, ready_in_s=usual_s)
        if start is None or start.took_s is not None:  # Serve looks for a place
            return cls(ModelStatus.LOADING, "waiting for a place", 0, usual_s)
        if start.failed is not None:
            return cls(ModelStatus.FAILED, start.failed[:_LONGEST_REASON], ready_in_s=usual_s)
        spent_s = max(0.0, now_s - start.began_s)
        percent = min(_NEARLY, int(100 * spent_s / usual_s))
        return cls(ModelStatus.LOADING, start.stage, percent, max(1.0, usual_s - spent_s))

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


class Models:
    """Each model by its name; the first is the default. A single one has the empty name."""

    def __init__(self, admissions: Mapping[str, "Admission"]) -> None:
        self._admissions = admissions

    async def describe(self) -> ModelInfo:
        """The default model. Raises NotReady."""
        return await next(iter(self._admissions.values())).describe()

    async def infos(self) -> Sequence[ModelInfo]:
        """Every model that can be described now, the default first. Raises NotReady if none can."""
        if len(self._admissions) == 1:
            return [await self.describe()]
        asked = [each.describe() for each in self._admissions.values()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        known = [each for each in answers if isinstance(each, ModelInfo)]
        failed = [each for each in answers if isinstance(each, BaseException) and not isinstance(each, NotReady)]
        if failed or not known:
            raise failed[0] if failed else NotReady("no model can be described yet")
        return known

    def __len__(self) -> int:
        return len(self._admissions)

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """The audio of one utterance, from the Admission of the request's model. Raises as that does."""
        return self._admissions[request.model].admit(request, info)

    def check_room(self, client: str) -> None:
        """Raises Overloaded or NotReady if every model would refuse a request of this client now.

        The default model's refusal counts then, and none if another one has room.
        """
        if all(admission.room.would_refuse(client) for admission in self._admissions.values()):
            next(iter(self._admissions.values())).room.check(client)

    def load(self) -> tuple[int, int, int]:
        """Streams of all models here that are spoken, that wait for their first audio, and that may be open at most."""
        rooms = [admission.room for admission in self._admissions.values()]
        speaking, streams = sum(room.num_speaking for room in rooms), sum(room.num_streams for room in rooms)
        return speaking, streams - speaking, sum(room.settings.max_streams for room in rooms)

    def states(self) -> dict[str, ModelState]:
        """The state of each model, by its name."""
        return {name: admission.state() for name, admission in self._admissions.items()}
