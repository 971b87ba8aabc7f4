"""Several models behind the one port to speech, each with an admission of its own."""

import asyncio
from collections.abc import Mapping, Sequence

from deployments.errors import NotReady
from deployments.protocol import ModelInfo
from serve_app.speech.admission import Admission
from serve_app.speech.model_state import ModelState
from serve_app.speech.segments import Utterance


class ModelAdmissions:
    """Each model's Admission by the model's name; the first is the default. A single one has the empty name."""

    def __init__(self, admissions: Mapping[str, Admission]) -> None:
        self._admissions = admissions

    async def describe(self) -> ModelInfo:
        """The default model. Raises NotReady."""
        return await next(iter(self._admissions.values())).describe()

    async def infos(self) -> Sequence[ModelInfo]:
        """Every model that can be described now, the default first. Raises NotReady if none can."""
        if len(self._admissions) == 1:
            return [await self.describe()]
        descriptions = [admission.describe() for admission in self._admissions.values()]
        answers = await asyncio.gather(*descriptions, return_exceptions=True)
        infos = [answer for answer in answers if isinstance(answer, ModelInfo)]
        failed = [
            answer for answer in answers if isinstance(answer, BaseException) and not isinstance(answer, NotReady)
        ]
        if failed or not infos:
            raise failed[0] if failed else NotReady("no model can be described yet")
        return infos

    def __len__(self) -> int:
        return len(self._admissions)

    def of(self, utterance: Utterance) -> Admission:
        return self._admissions[utterance.synthesis.model]

    def check_room(self, client: str) -> None:
        """Raises Overloaded or NotReady if every model would refuse a request of this client now.

        The default model's refusal counts then, and none if another one has room.
        """
        if all(admission.room.would_refuse(client) for admission in self._admissions.values()):
            next(iter(self._admissions.values())).room.check(client)

    def stream_counts(self) -> tuple[int, int, int]:
        """Streams of all models here that are spoken, that wait for their first audio, and that may be open at most."""
        rooms = [admission.room for admission in self._admissions.values()]
        speaking, streams = sum(room.num_speaking for room in rooms), sum(room.num_streams for room in rooms)
        return speaking, streams - speaking, sum(room.settings.max_streams for room in rooms)

    def states(self) -> dict[str, ModelState]:
        """The state of each model, by its name."""
        return {name: admission.room.state() for name, admission in self._admissions.items()}
