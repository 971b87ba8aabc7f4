"""The HTTP surface, complete but for what speaks: that is injected."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from deployments.errors import PayloadTooLarge, TalkrayError
from deployments.protocol import ModelInfo
from serve_app.access import Access
from serve_app.admission import Admission, always
from serve_app.api_settings import ApiSettings
from serve_app.boundary import RequestBoundary
from serve_app.catalogue import catalogue_routes
from serve_app.client_limits import ClientLimits
from serve_app.delivery import Delivery, negotiate
from serve_app.errors import INTERNAL, translate
from serve_app.long_text import LongText
from serve_app.metering import FirstByteMeter, MeteredSynthesizer
from serve_app.node import Node, metrics_routes
from serve_app.refusals import BodyTooSlow
from serve_app.rendering import Rendering
from serve_app.schemas import SpeechBody, parse_object, parse_speech
from serve_app.server_timing import ServerTiming
from serve_app.speech_request import build_request
from serve_app.speech_response import SpeechResponse
from serve_app.speech_stream import Usage, audio_body, event_body
from serve_app.synthesizer import Synthesizer
from serve_app.websocket import websocket_routes

logger = logging.getLogger(__name__)

SPEECH_DOCS = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": SpeechBody.model_json_schema()}},
    }
}


def create_api(
    synthesizer: Synthesizer, settings: ApiSettings, *, echo_request_id: bool = True, node: Node | None = None
) -> FastAPI:
    """The whole surface, for texts of any length that `settings` allow. Without a `node` it has no metrics to show.

    `echo_request_id` is False where the server in front adds `x-request-id` to responses itself, as Ray Serve does.
    """
    is_running = node.is_running if node else always
    admission = Admission(LongText(synthesizer), settings.admission, is_running=is_running)
    synthesizer = MeteredSynthesizer(admission)
    api = FastAPI(title="Talkray", docs_url=None, redoc_url=None)  # the documentation pages load scripts from a CDN
    api.add_middleware(FirstByteMeter)
    api.add_middleware(ClientLimits, settings=settings.admission)
    api.add_middleware(Access, settings=settings)
    if settings.access.allowed_origins:
        api.add_middleware(
            CORSMiddleware,
            allow_origins=settings.access.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "x-sample-rate", "retry-after"),
        )
    api.add_middleware(RequestBoundary, echo_request_id=echo_request_id)  # the outermost
    api.add_exception_handler(TalkrayError, _answer_error)
    api.add_exception_handler(HTTPException, _answer_error)
    api.include_router(status_routes(synthesizer))
    if node is not None:
        api.include_router(metrics_routes(node))
    api.include_router(catalogue_routes(synthesizer, settings))
    api.include_router(speech_routes(synthesizer, settings, check_room=admission.check_room))
    api.include_router(websocket_routes(synthesizer, settings))
    return api


async def _answer_error(request: Request, error: Exception) -> Response:
    reply = translate(error)
    if reply.status == INTERNAL.status:
        logger.error("request %s failed", request.state.request_id, exc_info=error)
    return reply.response()


def status_routes(synthesizer: Synthesizer) -> APIRouter:
    """Cheap answers about the server itself."""
    router = APIRouter()

    @router.get("/v1")
    @router.get("/v1/")
    @router.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive. Some clients open their connection with a request for `/v1/`."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        """Speech can be asked for."""
        return {"status": "ready", "model": (await synthesizer.describe()).name}

    return router


def speech_routes(synthesizer: Synthesizer, settings: ApiSettings, *, check_room: Callable[[], None]) -> APIRouter:
    """`POST /v1/audio/speech`. `check_room` raises where there is no point in parsing a request."""
    router = APIRouter()

    @router.post("/v1/audio/speech", response_class=Response, openapi_extra=SPEECH_DOCS)
    async def speech(request: Request) -> Response:
        """Speaks `input`, streaming unless `stream` is false."""
        content = await read_body(request, settings)
        check_room()
        fields = parse_object(content)
        body = parse_speech(fields)
        info = await synthesizer.describe()
        utterance = await build_request(body, info, settings, request_id=request.state.request_id)
        delivery = negotiate(body, ", ".join(request.headers.getlist("accept")))
        rendering = Rendering(delivery, info.sample_rate, info.frame_samples)
        timing = ServerTiming(request.state.received_ns) if settings.server_timing else None
        chunks = (
            timing.watch(synthesizer.synthesize(timing.begin(utterance)))
            if timing
            else synthesizer.synthesize(utterance)
        )
        stream = event_body(chunks, rendering) if delivery.events else audio_body(chunks, rendering, Usage())
        late_headers = timing.headers if timing else dict
        return SpeechResponse(stream, speech_headers(delivery, info), whole=delivery.whole, late_headers=late_headers)

    return router


def speech_headers(delivery: Delivery, info: ModelInfo) -> Mapping[str, str]:
    """Headers that keep proxies from buffering and tell clients what raw PCM is."""
    return {
        "content-type": delivery.content_type(info.sample_rate),
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        "x-sample-rate": str(info.sample_rate),
    }


async def read_body(request: Request, settings: ApiSettings) -> bytes:
    """The body, given up as soon as it is too large or too slow, whatever its Content-Length says."""
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > settings.max_body_bytes:
                    raise PayloadTooLarge(f"The body is larger than {settings.max_body_bytes} bytes.")
    except TimeoutError:
        raise BodyTooSlow(f"The body did not arrive within {settings.body_timeout_s:g} seconds.") from None
    return bytes(body)
