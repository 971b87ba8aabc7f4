"""FastAPI application of an ingress replica, with all HTTP routes and WebSockets."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from fastapi import APIRouter, Depends, FastAPI, Response
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection

from deployments.errors import NotReady, Starting, TalkrayError
from deployments.protocol import ModelKind
from serve_app.api.access.access_control import AccessControl
from serve_app.api.access.callers import VISITOR
from serve_app.api.catalogue import check_default, check_model, not_loaded
from serve_app.api.context import HeadAsGet, RequestContext, state_of
from serve_app.api.docs_page import docs_routes
from serve_app.api.error_replies import INTERNAL, translate
from serve_app.api.headers import EXPOSED_HEADERS
from serve_app.api.request_record import RequestRecord
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.routing import charging, dialects_of, http_router, socket_router
from serve_app.api.speech_service import SpeechService
from serve_app.config import AdmissionSettings, ApiSettings
from serve_app.distribution import version
from serve_app.extension import Charge, Dialect, ExtensionState, Node, OpenContext, hooks_of, in_order, open_all
from serve_app.extensions import load_extensions
from serve_app.speech.model_state import ModelStatus
from serve_app.speech.speech_models import SpeechModel, SpeechModels, always
from serve_app.speech.utterance_synthesizer import Synthesizer

logger = logging.getLogger(__name__)

_OWN_METRIC = re.compile(rb"(# (HELP|TYPE) )?ray_talkray_")
# Tags of Talkray's own routes. `/docs` expands these tags, in this order.
OWN_TAGS = ("Speech", "Models and voices", "Stored voices", "Jobs", "Codec frames", "This server")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_api(
    synthesizers: Mapping[str, tuple[Synthesizer, AdmissionSettings]],
    settings: ApiSettings,
    *,
    opened: Mapping[str, object],
    echo_request_id: bool = True,
    node: Node | None = None,
    added: Mapping[str, object] | None = None,
) -> FastAPI:
    """Create the application with the dialects of the core and all extensions.

    `synthesizers`: each model's synthesizer and limits, by model name. The first model is the default; if there is only
    one, its name is empty. `opened`: states of extensions that have already been opened, by extension name. The
    function opens all other extensions and stores all states in `api.state.opened`. Set `echo_request_id` to False if
    the server in front already adds `x-request-id`, as Ray Serve does. Without `node`, the application has no metrics
    routes. `added`: Ray Serve handles of extensions' deployments, by extension name.
    """
    extensions = load_extensions(settings.extensions)
    dialects = dialects_of(extensions)
    models = SpeechModels({name: _speech_model(name, *pools, node=node) for name, pools in synthesizers.items()})
    context = OpenContext(settings, models, dialects, opened, node)
    ordered = in_order(extensions)
    states = open_all(ordered, context, added or {})
    joined = {name: state for name, state in states.items() if isinstance(state, ExtensionState)}
    for name, state in joined.items():
        if type(state).observe is not ExtensionState.observe:
            models.add_observer(name, state.observe)
    service = SpeechService(Resolver(models, settings, hooks_of(ordered, states)), states)
    headings = {"This server", *(dialect.heading or dialect.name for dialect in dialects)}
    own_tags = [tag for tag in OWN_TAGS if tag in headings]
    api = FastAPI(
        title="Talkray",
        version=version(),
        description=_about(dialects),
        openapi_tags=[{"name": tag} for tag in own_tags],  # tags of other services follow
        docs_url=None,  # FastAPI's page loads its scripts from a CDN
        redoc_url=None,
    )
    api.state.opened = states
    api.add_middleware(HeadAsGet)
    api.add_middleware(
        AccessControl, settings=settings, dialects=dialects, grants=[state.grant for state in joined.values()]
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

    def on_end(record: RequestRecord) -> None:
        for name, state in joined.items():
            try:
                state.receive(record)
            except Exception:
                logger.exception("request %s: the extension %s failed to process its record", record.request_id, name)

    # Added last, so it runs around the others.
    api.add_middleware(RequestContext, echo_request_id=echo_request_id, on_end=on_end, dialects=by_path)
    api.add_exception_handler(TalkrayError, _answer_error)
    api.add_exception_handler(HTTPException, _answer_error)
    api.include_router(docs_routes(api.title, open_tags=own_tags))
    # These dependencies only feed the OpenAPI page: AccessControl has already checked the key.
    keyed = [Depends(HTTPBearer(auto_error=False))] if settings.access.keys_file else []
    api.include_router(http_router(dialects, service), dependencies=keyed)
    api.include_router(status_routes(models, settings, node.is_ready if node else always), tags=["This server"])
    if node is not None:
        api.include_router(metrics_routes(node), tags=["This server"])
    api.include_router(socket_router(dialects, service))
    return api


def _about(dialects: Iterable[Dialect]) -> str:
    """Return the introduction to `/docs`. It lists the WebSockets, which OpenAPI cannot describe."""
    paths = ", ".join(sorted({f"`{path}`" for dialect in dialects for path, _ in dialect.sockets}))
    sockets = f"\n\nWebSockets, which OpenAPI cannot list: {paths}." if paths else ""
    has_page = any(route.operation == "GET /" for dialect in dialects for route in dialect.routes)
    link = "[The page](./) speaks a text in the browser. " if has_page else ""
    order = "Talkray's own routes come first, then routes for clients of other services: click a name to open them."
    return f"{link}{order}{sockets}"


def _speech_model(
    model: str, synthesizer: Synthesizer, settings: AdmissionSettings, *, node: Node | None
) -> SpeechModel:
    if node is None:
        return SpeechModel(synthesizer, settings, model=model)
    is_running, state = partial(node.is_running, model), partial(node.state, model)
    return SpeechModel(synthesizer, settings, is_running=is_running, state=state, model=model)


async def _answer_error(request: HTTPConnection, error: Exception) -> Response:
    reply = translate(error)
    # Do not log GETs until the server is ready, because load balancers poll `/ready`.
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
        """Return 200 while the process is alive. Some clients request `/v1/` before they send speech requests."""
        return {"status": "ok"}

    @router.get("/ready", summary="Whether the server is ready for speech requests")
    async def readiness(model: str | None = None) -> dict[str, object]:
        """Return 200 if `model`, or any model, is ready. If there are several, the response lists each state."""
        if len(models) > 1:
            return await _ready_of(models, settings, model)
        if not is_ready():
            raise NotReady
        info = await models.describe()
        check_model(model, info, settings)
        clones = info.kind is ModelKind.BASE
        check_default(settings, info.name, info.voices, clones=clones)  # for nodes that lack the checkpoint
        [state] = models.states().values()
        return {"status": "asleep" if state.status is ModelStatus.ASLEEP else "ready", "model": info.name}

    return router


_SPEAKING = (ModelStatus.READY, ModelStatus.ASLEEP, ModelStatus.AT_ZERO)


async def _ready_of(models: SpeechModels, settings: ApiSettings, name: str | None) -> dict[str, object]:
    """Return the `/ready` response for a server with several models. Raises NotReady, ModelNotFound."""
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
    """Create the metrics routes of this node. On a cluster, Prometheus scrapes each node's metrics agent instead."""
    router = APIRouter()

    @router.get("/metrics", summary="Talkray's metrics", response_class=Response)
    async def metrics() -> Response:
        """Return this node's Talkray metrics, without Ray's own, of which there are a hundred times as many."""
        return Response(visible(own_metrics(await run_in_threadpool(node.scrape))), media_type=METRICS_TYPE)

    counted = charging(Charge.REQUEST)

    @router.get("/metrics/all", summary="Ray's metrics too", response_class=Response, dependencies=counted)
    async def all_metrics() -> Response:
        """Return all metrics of this node's agent."""
        return Response(visible(await run_in_threadpool(node.scrape)), media_type=METRICS_TYPE)

    return router


def visible(exported: bytes) -> bytes:
    """Return the metrics that the caller may see. Only admin keys may see usage by key name."""
    if VISITOR.get().sees_all:
        return exported
    return b"".join(line for line in exported.splitlines(keepends=True) if b"talkray_usage_" not in line)


def own_metrics(exported: bytes) -> bytes:
    """Return the lines of the Prometheus text format that belong to Talkray."""
    return b"".join(line for line in exported.splitlines(keepends=True) if _OWN_METRIC.match(line))
