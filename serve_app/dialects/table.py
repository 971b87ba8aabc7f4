"""The declaration of a dialect, and the routers that are made of it."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from string import Template
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.websockets import WebSocket

from serve_app.api.context import ENDPOINT_DIALECT, state_of
from serve_app.api.sockets.connection import Connection, refuse_handshake
from serve_app.api.speech_service import SpeechService


@dataclass(frozen=True, slots=True)
class Route:
    """One HTTP route. `answer` takes the SpeechService, then the arguments that FastAPI gives an endpoint. The `answer`
    of a `POST` returns a Response.
    """

    place: str  # method and path: "POST /v1/speak"
    answer: Callable[..., Awaitable[object]]
    summary: str | None = None  # None: /docs does not show it
    docs: dict[str, Any] = field(default_factory=dict)  # added to the OpenAPI that FastAPI makes


@dataclass(frozen=True, slots=True)
class Sample:
    """A request as a client sends it. `$text` and `$voice` stand for any text and voice, `$url` for the server's
    address, `$sockets` for the same address with ws://.
    """

    path: str  # with its query
    messages: tuple[Mapping[str, object], ...] = ()  # JSON messages on a WebSocket
    body: Mapping[str, object] | None = None  # JSON body of a POST
    protocols: tuple[str, ...] = ()  # subprotocols that the handshake offers
    audio_field: str = ""  # of messages on the WebSocket, with audio in base64; "": audio comes in binary messages
    clients: tuple[str, ...] = ()  # how to configure each client that was tried

    def filled(self, **words: str) -> "Sample":
        return Sample(**{each.name: _filled(getattr(self, each.name), words) for each in fields(self)})


@dataclass(frozen=True, slots=True)
class Dialect:
    """One family of clients. The API, its door, `check-client`, the fuzzers and the tests read this declaration."""

    name: str
    routes: tuple[Route, ...] = ()
    sockets: tuple[tuple[str, type[Connection]], ...] = ()  # by path; a path may have one for each subprotocol
    heading: str | None = None  # in /docs; None: the name
    key_headers: tuple[str, ...] = ()  # beside `Authorization`
    key_protocols: tuple[str, ...] = ()  # a key stands behind one of these in a subprotocol: browsers send no headers
    sample: Sample | None = None

    @property
    def paths(self) -> list[str]:
        return [*(route.place.split()[1] for route in self.routes), *(path for path, _ in self.sockets)]


def http_router(dialect: Dialect, service: SpeechService) -> APIRouter:
    router = APIRouter(tags=[dialect.heading or dialect.name])
    for route in dialect.routes:
        method, path = route.place.split()
        returns: dict[str, Any] = {"response_class": Response} if method == "POST" else {"response_model": None}  # JSON
        router.add_api_route(
            path,
            _endpoint(route.answer, service, dialect.name),
            methods=[method],
            summary=route.summary,
            include_in_schema=route.summary is not None,
            openapi_extra=route.docs,
            **returns,
        )
    return router


def socket_router(dialects: Iterable[Dialect], service: SpeechService) -> APIRouter:
    """Routes of all WebSockets. A handshake on any other path gets a 404; Starlette's own answer would be a 403."""
    kinds: dict[str, dict[type[Connection], str]] = {}
    for dialect in dialects:
        for path, kind in dialect.sockets:
            kinds.setdefault(path, {})[kind] = dialect.name
    router = APIRouter()
    for path, of_path in kinds.items():
        router.add_api_websocket_route(path, partial(_converse, of_path, service))
    router.add_api_websocket_route("/{path:path}", _refuse_unknown)
    return router


def _endpoint(
    answer: Callable[..., Awaitable[object]], service: SpeechService, dialect: str
) -> Callable[..., Awaitable[object]]:
    bound = partial(answer, service)
    setattr(bound, ENDPOINT_DIALECT, dialect)
    bound.__name__, bound.__doc__ = answer.__name__, answer.__doc__  # type: ignore[attr-defined]  # shown by /docs
    return bound


async def _converse(kinds: Mapping[type[Connection], str], service: SpeechService, socket: WebSocket) -> None:
    """Serves the socket with the kind whose subprotocol the client offers, else with the kind that has none. `kinds`:
    with their dialects.
    """
    offered = socket.scope["subprotocols"]
    named = next((kind for kind in kinds if kind.subprotocol in offered), None)
    kind = named or next(kind for kind in kinds if kind.subprotocol is None)
    state_of(socket).record.dialect = kinds[kind]
    await kind.run(socket, service)


async def _refuse_unknown(socket: WebSocket) -> None:
    await refuse_handshake(socket, HTTPException(404))


def _filled(value: Any, words: Mapping[str, str]) -> Any:
    match value:
        case str():
            return Template(value).safe_substitute(words)
        case dict():
            return {name: _filled(item, words) for name, item in value.items()}
        case list() | tuple():
            return type(value)(_filled(item, words) for item in value)
    return value
