"""A server with a job manager of its own, whose synthesizer is a fake."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path

import httpx
import numpy as np

from deployments.protocol import FinishReason, ModelInfo, PcmChunk, Reading, SynthesisRequest
from serve_app.api.request_record import RequestRecord
from serve_app.config import AccessSettings, ApiSettings
from serve_app.extensions.jobs.job_manager import JobManager
from serve_app.extensions.jobs.planning import resolver_of_jobs
from serve_app.extensions.jobs.segment_maker import SegmentMaker
from serve_app.extensions.jobs.settings import JobSettings
from serve_app.extensions.voices.extension import open_voices
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.speech.speech_models import SpeechModel, SpeechModels
from tests.serve_app.fake import FOLLOWED, FakeSynthesizer, tone
from tests.serve_app.one_model import client_of, one_api


class Speaker(FakeSynthesizer):
    """Speaks a frame for each character; the codes of a frame are its text's seed and its number."""

    def __init__(self, info: ModelInfo = FOLLOWED) -> None:
        super().__init__(info)
        self.running = self.most_running = 0
        self.errors: list[Exception] = []  # raised by the next requests, in turn
        self.reasons: dict[int, FinishReason] = {}  # by seed
        self.gate = asyncio.Event()  # nothing ends before it is set
        self.gate.set()

    async def synthesize(self, request: SynthesisRequest, info: object = None) -> AsyncGenerator[PcmChunk, None]:
        self.requests.append(request)
        if self.errors:
            raise self.errors.pop(0)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
            assert self.info is not None
            size, count = self.info.frame_samples, len(request.text)
            codes = np.full((count, self.info.num_code_groups), request.seed % 2048, np.int16)
            codes[:, 1] = np.arange(count)
            reading = Reading(0, tuple(float(number) for number in range(count)))
            reason = self.reasons.get(request.seed, FinishReason.STOP)
            yield PcmChunk(tone(size * count), codes, count, reason, position=size * count, readings=(reading,))
        finally:
            self.running -= 1


class Server:
    """The API and its job manager over one store; `start` runs it, `die` ends it as a killed process would."""

    def __init__(
        self,
        folder: Path,
        speaker: FakeSynthesizer,
        jobs: JobSettings | None = None,
        access: AccessSettings | None = None,
    ) -> None:
        settings = ApiSettings(
            voices=VoiceSettings(store=str(folder)),
            jobs=jobs or JobSettings(),
            access=access or AccessSettings(),
            disclose_synthetic=True,
        )
        self.voices = open_voices(settings.of(VoiceSettings))
        models = SpeechModels({"": SpeechModel(speaker, settings.admission)})
        resolver = resolver_of_jobs(models, settings, self.voices)
        self.hindrance: str | None = None
        self.records: list[RequestRecord] = []  # of segments
        self.synthesizers = {"": speaker}
        maker = SegmentMaker(self.synthesizers, self.voices, self.records.append)
        self.manager = JobManager(resolver, self.voices, maker, hindrance=lambda model: self.hindrance)
        self.api = one_api(speaker, settings, opened={"voices": self.voices, "jobs": self.call})
        self._running: asyncio.Task[None] | None = None

    async def call(self, method: str, *arguments: object) -> object:
        return await getattr(self.manager, method)(*arguments)

    def client(self, **headers: str) -> httpx.AsyncClient:
        return client_of(self.api, headers)

    def start(self) -> None:
        self._running = asyncio.create_task(self.manager.run())

    async def die(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    speaker: Speaker,
    jobs: JobSettings | None = None,
    *,
    access: AccessSettings | None = None,
    **headers: str,
) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    """A server that runs, and a client of it that sends these headers."""
    server = Server(folder, speaker, jobs, access)
    server.start()
    try:
        async with server.client(**headers) as client:
            yield server, client
    finally:
        await server.die()


async def asked(client: httpx.AsyncClient, *texts: str, **fields: object) -> httpx.Response:
    body = {"voice": "ryan", "inputs": [{"input": text} for text in texts], **fields}
    return await client.post("/v1/audio/jobs", json=body)


async def started(client: httpx.AsyncClient, *texts: str, **fields: object) -> dict[str, object]:
    answer = await asked(client, *texts, **fields)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def until(client: httpx.AsyncClient, job: Mapping[str, object], status: str) -> dict[str, object]:
    """The job once it has this status."""
    async with asyncio.timeout(10):
        while True:
            answer = await client.get(f"/v1/audio/jobs/{job['id']}")
            assert answer.status_code == 200, answer.text
            if (told := answer.json())["status"] == status:
                return told
            await asyncio.sleep(0.01)


async def so(condition: Callable[[], bool]) -> None:
    """Returns once it is so."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110, the manager has no event for it
            await asyncio.sleep(0)
