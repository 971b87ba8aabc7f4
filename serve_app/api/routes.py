"""The application of an ingress replica: all HTTP routes and WebSockets."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter, Depends, FastAPI, Response
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection

from deployments.errors import NotReady, Starting, TalkrayError
from deployments.protocol import ModelKind
from serve_app.api import openai_models, openai_speech
from serve_app.api.access.door import Door
from serve_app.api.catalogue import check_default, check_model, not_loaded
from serve_app.api.context import HeadAsGet, RequestContext, state_of
from serve_app.api.error_replies import INTERNAL, translate
from serve_app.api.headers import EXPOSED_HEADERS
from serve_app.api.request_record import RequestRecord
from serve_app.api.speech_service import SpeechService
from serve_app.config import AdmissionSettings, ApiSettings
from serve_app.distribution import version
from serve_app.extension import (
    Charge,
    Dialect,
    Extension,
    charging,
    check_places,
    http_router,
    load_extensions,
    socket_router,
)
from serve_app.extensions.continuity.joints import Tails
from serve_app.extensions.live.live_text import LiveTexts
from serve_app.extensions.page.cluster_status import ClusterStatus, cluster_routes
from serve_app.extensions.page.web_pages import PATHS, page_routes
from serve_app.extensions.voices.library import Voices
from serve_app.speech.model_state import ModelState, ModelStatus, ready
from serve_app.speech.speech_models import KeepTail, SpeechModel, SpeechModels, always
from serve_app.speech.synthesizer import Synthesizer
from serve_app.visitor import VISITOR

logger = logging.getLogger(__name__)

_OWN_METRIC = re.compile(rb"(# (HELP|TYPE) )?ray_talkray_")
OWN_TAGS = ("Speech", "Models and voices", "Stored voices", "Jobs", "Codec frames", "This server")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Node:
    """What an ingress replica asks of its node and of the pools."""

    is_running: Callable[[str], bool]  # whether each pool of a model has a replica that takes requests
    is_ready: Callable[[], bool]  # whether a request can be spoken; with a pool at zero it can, after a start
    scrape: Callable[[], bytes]  # all metrics of this node's processes, in Prometheus' text format; blocks
    state: Callable[[str], ModelState] = lambda model: ready()
    status: ClusterStatus | None = None  # None: there is no `/status`


def dialects_of(extensions: Iterable[Extension]) -> tuple[Dialect, ...]:
    """The core's own dialects, then those of the extensions. Raises StartError if two have the same place."""
    core = Extension("the core", dialects=(openai_speech.DIALECT, openai_models.DIALECT))
    check_places(every := (core, *extensions))
    return tuple(dialect for extension in every for dialect in extension.dialects)


def create_api(
    synthesizers: Mapping[str, tuple[Synthesizer, AdmissionSettings]],
    settings: ApiSettings,
    *,
    echo_request_id: bool = True,
    node: Node | None = None,
    live_texts: LiveTexts | None = None,
    voices: Voices | None = None,
    opened: Mapping[str, object] | None = None,
    keep: Callable[[RequestRecord], None] = lambda record: None,
) -> FastAPI:
    """The application with all dialects.

    `synthesizers`: each model's, with its limits, by its name; the default model is the first, and a single one has the
    empty name. Without a `node` there are no routes for metrics. `live_texts` holds the texts that clients are still
    writing, `voices` the stored voices; by default `settings` name these. `opened`: what `open` of each
    extension returned, by its name.
    `echo_request_id` is False where the server in front adds `x-request-id` to responses, as Ray Serve does. `keep` is
    called with the record of each request at its end.
    """
    dialects = dialects_of(load_extensions(settings.extensions))
    live_texts = live_texts or LiveTexts()
    voices = voices or Voices.of(settings.voices)
    tails = Tails()
    models = SpeechModels(
        {name: _speech_model(name, *pools, node=node, keep_tail=tails.save) for name, pools in synthesizers.items()}
    )
    api = FastAPI(
        title="Talkray",
        version=version(),
        description=_about(dialects, page=settings.page),
        openapi_tags=[{"name": tag} for tag in OWN_TAGS],  # other services' follow
        docs_url=None,  # FastAPI's page loads its scripts from a CDN
        redoc_url=None,
    )
    api.add_middleware(HeadAsGet)
    key_headers = tuple(name for dialect in dialects for name in dialect.key_headers)
    key_protocols = tuple(prefix for dialect in dialects for prefix in dialect.key_protocols)
    api.add_middleware(
        Door, settings=settings, key_headers=key_headers, key_protocols=key_protocols, public_paths=PATHS
    )
    if settings.access.allowed_origins:
        api.add_middleware(
            CORSMiddleware,
            allow_origins=settings.access.allowed_origins,
            allow_methods=("GET", "POST", "DELETE", "PATCH"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    by_path = {path: dialect.name for dialect in dialects for path in dialect.paths}
    api.add_middleware(RequestContext, echo_request_id=echo_request_id, keep=keep, dialects=by_path)  # the outermost
    api.add_exception_handler(TalkrayError, _answer_error)
    api.add_exception_handler(HTTPException, _answer_error)
    clients = {dialect.name: dialect.sample.clients for dialect in dialects if dialect.sample is not None}
    api.include_router(page_routes(api.title, clients if settings.page else None, open_tags=OWN_TAGS))
    # Only for the OpenAPI page: the door has checked the key before.
    keyed = [Depends(HTTPBearer(auto_error=False))] if settings.access.keys_file else []
    service = SpeechService(models, settings, live_texts=live_texts, voices=voices, tails=tails, opened=opened)
    api.include_router(http_router(dialects, service), dependencies=keyed)
    api.include_router(status_routes(models, settings, node.is_ready if node else always), tags=["This server"])
    if node is not None:
        api.include_router(metrics_routes(node), tags=["This server"])
    if node is not None and node.status is not None:
        node.status.recent.watch(models)
        api.include_router(cluster_routes(models, node.status), tags=["This server"])
    api.include_router(socket_router(dialects, service))
    return api


def _about(dialects: Iterable[Dialect], *, page: bool) -> str:
    """The introduction of `/docs`. OpenAPI cannot describe WebSockets."""
    paths = ", ".join(sorted({f"`{path}`" for dialect in dialects for path, _ in dialect.sockets}))
    link = "[The page](./) speaks a text in the browser. " if page else ""
    order = "Talkray's own routes come first, then routes for clients of other services: click a name to open them."
    return f"{link}{order}\n\nWebSockets, which OpenAPI cannot list: {paths}."


def _speech_model(
    model: str,
    synthesizer: Synthesizer,
    settings: AdmissionSettings,
    *,
    node: Node | None,
    keep_tail: KeepTail,
) -> SpeechModel:
    return SpeechModel(
        synthesizer,
        settings,
        is_running=partial(node.is_running, model) if node else always,
        state=partial(node.state, model) if node else ready,
        model=model,
        keep_tail=keep_tail,
    )


async def _answer_error(request: HTTPConnection, error: Exception) -> Response:
    reply = translate(error)
    # A GET that finds the server not ready gets no line in the log: load balancers poll `/ready`.
    if request.scope.get("method", "POST") == "POST" or not isinstance(error, NotReady):
        state_of(request).record.error = reply.code
    if reply.status == INTERNAL.status:
        logger.error("request %s failed", state_of(request).record.request_id, exc_info=error)
    return reply.response()


def status_routes(models: SpeechModels, settings: ApiSettings, is_ready: Callable[[], bool]) -> APIRouter:
    router = APIRouter()

    @router.get("/v1", include_in_schema=False)
    @router.get("/v1/", include_in_schema=False)
    @router.get("/health", summary="Whether the process is alive")
    async def health() -> dict[str, str]:
        """The process is alive. Some clients ask for `/v1/` before they send speech requests."""
        return {"status": "ok"}

    @router.get("/ready", summary="Whether speech can be asked for")
    async def readiness(model: str | None = None) -> dict[str, object]:
        """Whether `model`, or any model, can speak. With several models the answer has the state of each."""
        if len(models) > 1:
            return await _ready_of(models, settings, model)
        if not is_ready():
            raise NotReady
        info = await models.describe()
        check_model(model, info, settings)
        clones = info.kind is ModelKind.BASE
        check_default(settings, info.name, info.voices, clones=clones)  # the checkpoint may be on no other node
        [state] = models.states().values()
        return {"status": "asleep" if state.status is ModelStatus.ASLEEP else "ready", "model": info.name}

    return router


_SPEAKING = (ModelStatus.READY, ModelStatus.ASLEEP, ModelStatus.AT_ZERO)


async def _ready_of(models: SpeechModels, settings: ApiSettings, name: str | None) -> dict[str, object]:
    """The answer of `/ready` with several models. Raises NotReady, ModelNotFound."""
    states = models.states()
    known = await models.infos()
    named = [voice for info in known for voice in info.voices]
    check_default(settings, "any model", named, clones=any(info.kind is ModelKind.BASE for info in known))
    wanted = [(model, state) for model, state in states.items() if name in (None, model)]
    if not wanted:
        raise not_loaded(str(name), known, settings)
    speaking = [model for model, state in wanted if state.status in _SPEAKING]
    if not speaking:
        waits = [state.ready_in_s for _, state in wanted if state.ready_in_s is not None]
        raise Starting("; ".join(f"{model} is {state}" for model, state in wanted) + ".", min(waits, default=1.0))
    return {"status": "ready", "model": speaking[0], "models": {model: state.as_json() for model, state in wanted}}


def metrics_routes(node: Node) -> APIRouter:
    """Metrics of this node. On a cluster Prometheus scrapes the agent of each node instead."""
    router = APIRouter()

    @router.get("/metrics", summary="Talkray's metrics", response_class=Response)
    async def metrics() -> Response:
        """Talkray's metrics of this node, without Ray's, which are a hundred times as many."""
        return Response(visible(own_metrics(await run_in_threadpool(node.scrape))), media_type=METRICS_TYPE)

    counted = charging(Charge.REQUEST)

    @router.get("/metrics/all", summary="Ray's metrics too", response_class=Response, dependencies=counted)
    async def all_metrics() -> Response:
        """All metrics of this node's agent."""
        return Response(visible(await run_in_threadpool(node.scrape)), media_type=METRICS_TYPE)

    return router


def visible(exported: bytes) -> bytes:
    """What the caller may see: the names of all keys, with their use, only with a key of an admin."""
    if VISITOR.get().sees_all:
        return exported
    return b"".join(line for line in exported.splitlines(keepends=True) if b"talkray_usage_" not in line)


def own_metrics(exported: bytes) -> bytes:
    """The lines of Prometheus' text format that are about Talkray."""
    return b"".join(line for line in exported.splitlines(keepends=True) if _OWN_METRIC.match(line))
