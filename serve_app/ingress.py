"""The ingress deployment: the HTTP and WebSocket surface, which calls the pools by their handles."""

import asyncio
import ctypes
import gc
from collections.abc import AsyncGenerator
from dataclasses import replace

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from deployments.errors import CodecLost, NotReady, TalkerLost
from deployments.protocol import FrameChunk, GenerateRequest, ModelInfo, PcmChunk, SynthesisRequest, reached
from deployments.serving import ray_metrics, ray_private
from deployments.serving.calls import broadcast, call, stream
from deployments.serving.failover import Received, persist
from deployments.serving.frames import forward
from serve_app.api.bounded_websocket import BoundedWebSocket
from serve_app.api.request import MAX_BODY_BYTES
from serve_app.api.routes import Node, create_api
from serve_app.api.taken_request import TakenHttp
from serve_app.audio.recordings import by_prompt, learn
from serve_app.config import ApiSettings
from serve_app.scaling.pool_watch import PoolWatch, scrape
from serve_app.speech.live_text import LiveTexts
from serve_app.voices.library import Voices

# A handle call waits for a replica however long that takes; a client that asks whether we are ready does not.
_DESCRIBE_TIMEOUT_S = 2.0
_C_LIBRARY = ctypes.CDLL(None)


class HandleSynthesizer:
    """Synthesis by the codec pool, which in turn asks the talker pool; or by the talker pool, whose GPU decodes too.

    The codec pool says in both cases which model is loaded: `describe` reaches a talker through it.
    """

    def __init__(self, codec: DeploymentHandle, *, talker: DeploymentHandle | None = None) -> None:
        """With a `talker`, the codec pool is only asked to read recordings to clone, for a talker on a CPU."""
        self._codec, self._talker = codec, talker
        self._info: ModelInfo | None = None

    async def describe(self) -> ModelInfo:
        """The loaded checkpoint, asked once; raises NotReady while the pools load."""
        if self._info is not None:
            return self._info
        try:
            info: ModelInfo = await asyncio.wait_for(call(self._codec, "describe", lost=CodecLost), _DESCRIBE_TIMEOUT_S)
        except TimeoutError:
            raise NotReady("the model is still loading") from None
        self._info = info
        return info

    def synthesize(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        """Audio of one utterance; leaving the generator frees everything behind it, down to the talker's KV blocks.

        A replica that is lost is followed by another one, which goes on at the very next sample.
        """
        request = _by_prompt(request)
        talker, info, reference = self._talker, self._info, request.reference
        if talker is None:
            return self._from_codec(request)
        assert info is not None, "whoever asks for speech has asked for what is loaded"
        is_read = reference is None or reference.x_vector_only or reference.prompt is not None
        if not is_read and not info.talker_on_gpu:
            return self._from_codec(request)

        def ask(asked: GenerateRequest) -> AsyncGenerator[FrameChunk, None]:
            asked = replace(asked, synthesis=_by_prompt(asked.synthesis))
            return stream(talker, "generate", asked, lost=TalkerLost)

        return forward(request, ask, info, learn=lambda chunk: _learn(request, chunk))

    def _from_codec(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        received, info = Received(), self._info
        assert info is not None, "whoever asks for speech has asked for what is loaded"

        def ask() -> AsyncGenerator[PcmChunk, None]:
            return stream(self._codec, "synthesize", _by_prompt(received.rest(request)), lost=CodecLost)

        def take(chunk: PcmChunk) -> PcmChunk | None:
            _learn(request, chunk)
            if not len(chunk.codes) and not chunk.pcm and chunk.finish_reason is None:
                return None  # a heartbeat
            received.add(chunk.codes, chunk.position, delivered_s=len(chunk.pcm) / 2 / info.sample_rate)
            return reached(chunk, "from-codec")

        return persist(ask, take, request_id=request.request_id, lost=CodecLost)


def _by_prompt(request: SynthesisRequest) -> SynthesisRequest:
    """`request` without the samples of a recording that a replica has answered for since it came."""
    reference = request.reference
    return request if reference is None else replace(request, reference=by_prompt(reference))


def _learn(request: SynthesisRequest, chunk: PcmChunk) -> None:
    if request.reference is not None and chunk.clone_prompt is not None:
        learn(request.reference, chunk.clone_prompt)


class Forgetting:
    """Has every replica of the application drop what it keeps of stored voices that are no more."""

    def __init__(self, app_name: str) -> None:
        self._app_name, self._handles = app_name, dict[str, DeploymentHandle]()

    async def forget(self, voices: tuple[bytes, ...]) -> None:
        """Raises NotReady where a replica does not answer: ask again. A pool without replicas has nothing to drop."""
        own = serve.get_replica_context().deployment
        pools = await asyncio.to_thread(ray_private.pools, self._app_name)
        names = [name for name, pool in pools.items() if name != own and pool.running]
        for name in names:
            if name not in self._handles:
                self._handles[name] = serve.get_deployment_handle(name, self._app_name)
        await asyncio.gather(*(broadcast(self._handles[name], "forget", voices) for name in names))


class Ingress:
    """One replica of the HTTP surface. Imports no torch. Raises StartError where other hosts need no key."""

    def __init__(self, settings: ApiSettings, codec: DeploymentHandle, talker: DeploymentHandle | None = None) -> None:
        """`talker` as in HandleSynthesizer."""
        ray_metrics.install()
        ray_private.give_uvicorn(
            http=TakenHttp,
            ws=BoundedWebSocket,
            ws_max_size=MAX_BODY_BYTES,
            ws_per_message_deflate=False,
            ws_ping_timeout=None,  # a paused reader answers no ping; `MAX_UNREAD_S` ends it
            proxy_headers=False,
        )
        settings = settings.model_copy(update={"access": settings.access.for_host(ray_private.proxy_host())})
        app_name = serve.get_replica_context().app_name
        watch = PoolWatch(app_name)
        self._voices = Voices.of(settings.voices, num_nodes=ray_private.num_nodes(), forget=Forgetting(app_name).forget)
        node = Node(is_running=watch.is_running, is_ready=watch.is_ready, scrape=scrape)
        self._api = create_api(
            HandleSynthesizer(codec, talker=talker),
            settings,
            echo_request_id=False,
            node=node,
            live_texts=LiveTexts(get_node_ip_address()),
            voices=self._voices,
        )
        gc.collect()
        gc.freeze()  # a full collection of what has been loaded takes 0.1 s, in which no stream goes on

    async def check_health(self) -> None:
        """Serve calls this every few seconds. glibc gives back the pages that large messages and answers have left."""
        self._voices.follow()
        await asyncio.to_thread(_C_LIBRARY.malloc_trim, 0)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._api
