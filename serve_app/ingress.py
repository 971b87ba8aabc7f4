"""The ingress deployment: the HTTP and WebSocket surface, which calls the pools by their handles."""

import asyncio
import ctypes
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from deployments.config import TalkerConfig
from deployments.errors import CheckpointError, CodecLost, NotReady, ReplicaLost, Starting, TalkerLost
from deployments.protocol import FrameChunk, GenerateRequest, ModelInfo, PcmChunk, SynthesisRequest, with_mark
from deployments.serving import ray_metrics, ray_private
from deployments.serving.collector import leave_loaded_alone
from deployments.serving.failover import Received, ReplicaStream, with_failover
from deployments.serving.frames import TalkerAudio
from deployments.serving.handles import ask_all_replicas, ask_replica, read_replica
from deployments.weights.description import describe
from serve_app.api.bodies.client_json import MAX_BODY_BYTES
from serve_app.api.cluster_status import ClusterStatus, Recent
from serve_app.api.records.record_keeper import RecordKeeper, RecordSink, RequestLines
from serve_app.api.records.tracing import RequestSpans, otlp_exporter
from serve_app.api.records.usage import UsageBook
from serve_app.api.routes import Node, create_api
from serve_app.api.transport.bounded_websocket import BoundedWebSocket
from serve_app.api.transport.taken_http import TakenHttp
from serve_app.audio.recordings import by_prompt, keep_clone_prompt
from serve_app.config import AdmissionSettings, ApiSettings, RecordSettings
from serve_app.scaling.pool_watch import PoolWatch, scrape
from serve_app.speech.joints import Tails
from serve_app.speech.live_text import LiveTexts
from serve_app.voices.library import Voices
from serve_app.voices.voice_store import VoiceStore

logger = logging.getLogger(__name__)

# A handle call waits for a replica without a limit. A request waits this long for the model's description, and the call
# that all requests share is made again after the longer time, because its replica may hang.
_DESCRIBE_TIMEOUT_S, _ASK_TIMEOUT_S = 2.0, 10.0
# For an answer about jobs; a new job of a long book is checked text by text.
_JOBS_TIMEOUT_S, _CREATE_TIMEOUT_S = 10.0, 120.0
_C_LIBRARY = ctypes.CDLL(None)
# Of mallopt. Left alone, one free large block raises both to 32 MiB, and each thread's arena then keeps so much.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MIB = -1, -3, 1 << 20


@dataclass(frozen=True, slots=True)
class Deployed:
    """A model, as `build_app` binds it."""

    name: str  # "" of a single one
    checkpoint: str
    config: TalkerConfig
    on_gpu: bool
    admission: AdmissionSettings
    deployments: tuple[str, str]  # names of its talkers' and its codec's
    codec: DeploymentHandle
    # Where its GPU decodes, `inline`: the codec pool then only reads recordings to clone, for talkers on a CPU.
    talker: DeploymentHandle | None = None

    def known_info(self) -> ModelInfo | None:
        """What is known of one of several models without its talkers, which a call might start: from its files, else
        what another ingress has noted. None of a single one, whose talkers are asked.
        """
        if not self.name:
            return None
        try:
            info = describe(self.checkpoint, self.config, on_gpu=self.on_gpu)
        except CheckpointError as error:  # its talkers will not start; those of the others do
            logger.error("the model %s: %s", self.name, error)
            return None
        if info is not None:
            return self._named(info)
        note = ray_private.get_note(self._note_key)
        return None if note is None else TypeAdapter(ModelInfo).validate_json(note)

    def remember(self, info: ModelInfo) -> ModelInfo:
        """Notes for other ingresses what a talker has told."""
        info = self._named(info)
        ray_private.put_note(self._note_key, TypeAdapter(ModelInfo).dump_json(info))
        return info

    def _named(self, info: ModelInfo) -> ModelInfo:
        return replace(info, name=self.name, checkpoint=self.checkpoint)

    @property
    def _note_key(self) -> str:
        return f"description of {self.name}: {self.checkpoint}"


class HandleSynthesizer:
    """Asks a model's codec pool, which asks its talkers; or, where the talker's GPU decodes too, the talkers."""

    def __init__(self, served: Deployed) -> None:
        self._served = served
        self._info = served.known_info()
        self._asking: asyncio.Task[ModelInfo] | None = None

    async def describe(self) -> ModelInfo:
        """The loaded checkpoint, asked once for all requests; raises NotReady while the pools load."""
        if self._info is not None:
            return self._info
        if self._asking is None or self._asking.done():
            # In the context of a request Serve would cancel the call when that request's client leaves.
            self._asking = asyncio.create_task(self._remember(), context=Context())
            self._asking.add_done_callback(self._log_failure)
        # Requests for the others of several models do not wait.
        wait_s = 0.0 if self._served.name else _DESCRIBE_TIMEOUT_S
        try:
            return await asyncio.wait_for(asyncio.shield(self._asking), wait_s)
        except TimeoutError:
            raise NotReady("the model is still loading") from None

    async def _remember(self) -> ModelInfo:
        """One of several models may be at zero, and then the call is what starts it."""
        if self._served.name:
            self._info = self._served.remember(await self._ask())
        else:
            self._info = await asyncio.wait_for(self._ask(), _ASK_TIMEOUT_S)
        return self._info

    def _log_failure(self, asking: asyncio.Task[ModelInfo]) -> None:
        if not asking.cancelled() and (error := asking.exception()) is not None:
            logger.info("the model %s cannot be described yet: %r", self._served.name, error)

    async def _ask(self) -> ModelInfo:
        """Waits for a talker, however long that takes."""
        info: ModelInfo
        if self._served.talker is not None:
            info = await ask_replica(self._served.talker, "describe", lost=TalkerLost)
        else:
            info = await ask_replica(self._served.codec, "describe", self._served.name, lost=CodecLost)
        return info

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """Audio of one segment. Closing the generator ends all calls for it and frees its KV blocks.

        Where a replica is lost, another replica continues with the next sample.
        """
        request = _with_known_prompt(request)  # each later call asks again: a prompt may have come meanwhile
        reference = request.reference
        needs_codec = reference is not None and not reference.x_vector_only and reference.prompt is None
        if self._served.talker is None or (needs_codec and not info.talker_on_gpu):
            return with_failover(CodecAudio(request, self._served.codec, info))
        keep = partial(_keep_clone_prompt, request)
        return with_failover(TalkerAudio(request, self._generate, info, each_chunk=keep))

    def _generate(self, request: GenerateRequest) -> AsyncGenerator[FrameChunk, None]:
        assert self._served.talker is not None
        request = replace(request, synthesis=_with_known_prompt(request.synthesis))
        return read_replica(self._served.talker, "generate", request, lost=TalkerLost)


class CodecAudio(ReplicaStream[PcmChunk, PcmChunk]):
    """Audio of one segment from a codec pool, which asks talkers."""

    def __init__(self, request: SynthesisRequest, codec: DeploymentHandle, info: ModelInfo) -> None:
        super().__init__(request.request_id, CodecLost)
        self._request = request
        self._codec = codec
        self._sample_rate = info.sample_rate
        self._received = Received()

    def ask(self) -> AsyncGenerator[PcmChunk, None]:
        rest = _with_known_prompt(self._received.request_for_rest(self._request))
        return read_replica(self._codec, "synthesize", rest, lost=CodecLost)

    def receive(self, chunk: PcmChunk) -> PcmChunk | None:
        _keep_clone_prompt(self._request, chunk)
        if chunk.is_heartbeat:
            return None
        self._received.add(chunk.codes, chunk.position, delivered_s=chunk.num_samples / self._sample_rate)
        return with_mark(chunk, "from-codec")


def _with_known_prompt(request: SynthesisRequest) -> SynthesisRequest:
    """`request` with the clone prompt in place of its recording's samples, once a replica has sent the prompt."""
    reference = request.reference
    return request if reference is None else replace(request, reference=by_prompt(reference))


def _keep_clone_prompt(request: SynthesisRequest, chunk: PcmChunk) -> None:
    if request.reference is not None and chunk.clone_prompt is not None:
        keep_clone_prompt(request.reference, chunk.clone_prompt)


async def _ask_desk(handle: DeploymentHandle, what: str, *arguments: object) -> Any:
    """Asks the desk in the one replica that makes jobs."""
    try:
        calling = ask_replica(handle, "call", what, *arguments, lost=ReplicaLost)
        return await asyncio.wait_for(calling, _CREATE_TIMEOUT_S if what == "create" else _JOBS_TIMEOUT_S)
    except TimeoutError:
        raise Starting("The replica that makes jobs does not answer: it is starting.", 1.0) from None


async def _forget_everywhere(app_name: str, voices: tuple[bytes, ...]) -> None:
    """Have every replica of the application drop what it keeps of stored voices that are no more.

    Raises NotReady if a replica does not answer: ask again. A pool without replicas has nothing to drop.
    """
    own = serve.get_replica_context().deployment
    pools = await asyncio.to_thread(ray_private.pools, app_name)
    names = [name for name, pool in pools.items() if name != own and pool.running]
    handles = [serve.get_deployment_handle(name, app_name) for name in names]  # Serve keeps them
    await asyncio.gather(*(ask_all_replicas(handle, "forget", voices) for handle in handles))


def record_sinks(settings: RecordSettings, store: VoiceStore | None) -> list[RecordSink]:
    """What keeps the records of requests in this process, as the settings say. Raises StartError."""
    sinks: list[RecordSink] = []
    replica = ray_private.replica_name()
    if settings.traces is not None:  # the first, because the line names the trace
        sinks.append(RequestSpans(otlp_exporter(settings.traces), settings.trace_share, replica=replica))
    if settings.lines:
        sinks.append(RequestLines(ray_private.log_folder(), replica))
    if settings.usage:
        sinks.append(UsageBook(store, time.time))
    return sinks


class Ingress:
    """One replica of the HTTP surface, without torch. Raises StartError if other hosts need no key to connect."""

    def __init__(self, settings: ApiSettings, models: Sequence[Deployed], jobs: DeploymentHandle) -> None:
        """The default one of the `models` is the first."""
        ray_metrics.install(pool="ingress", models=tuple(each.name for each in models))
        ray_private.give_uvicorn(
            http=TakenHttp,
            ws=partial(BoundedWebSocket, trusted_proxies=settings.admission.trusted_proxies),
            ws_max_size=MAX_BODY_BYTES,
            ws_per_message_deflate=False,
            ws_ping_timeout=None,  # a paused reader answers no ping; `MAX_UNREAD_S` ends it
            proxy_headers=False,
        )
        settings = settings.model_copy(update={"access": settings.access.for_host(ray_private.proxy_host())})
        app_name = serve.get_replica_context().app_name
        recent = Recent(time.time)
        recent.follow()
        watch = PoolWatch(app_name, {each.name: each.deployments for each in models}, own_note=recent.note)
        forget = partial(_forget_everywhere, app_name)
        self._voices = Voices.of(settings.voices, num_nodes=ray_private.num_nodes(), forget=forget)
        self._keeper = RecordKeeper(record_sinks(settings.records, self._voices.store))
        node = Node(
            is_running=watch.is_running,
            is_ready=watch.is_ready,
            scrape=scrape,
            state=watch.state,
            status=ClusterStatus(recent, watch.sizes, watch.notes),
        )
        self._api = create_api(
            {each.name: (HandleSynthesizer(each), each.admission) for each in models},
            settings,
            echo_request_id=False,
            node=node,
            live_texts=LiveTexts(get_node_ip_address()),
            voices=self._voices,
            jobs=partial(_ask_desk, jobs),
            tails=Tails(ray_private.shared_key(f"seal of {app_name}")),
            keep=self._keeper.keep,
        )
        _C_LIBRARY.mallopt(_MMAP_THRESHOLD, _MIB)
        _C_LIBRARY.mallopt(_TRIM_THRESHOLD, _MIB)
        leave_loaded_alone()

    def __del__(self) -> None:
        """Serve calls it before it ends the process."""
        if hasattr(self, "_keeper"):
            self._keeper.close()

    async def check_health(self) -> None:
        """Return unused memory to the system: large messages and answers leave some. Serve calls this periodically."""
        self._voices.follow()
        await asyncio.to_thread(_C_LIBRARY.malloc_trim, 0)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._api
