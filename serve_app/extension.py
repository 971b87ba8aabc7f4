"""The declarations of extensions and their dialects, the loader, and the routers that are made of dialects."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from importlib import import_module
from string import Template
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fastapi import APIRouter, Depends, params
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from deployments.errors import StartError
from serve_app.api.context import ENDPOINT_DIALECT, state_of
from serve_app.api.handshake import refuse_handshake
from serve_app.api.speech_service import SpeechService
from serve_app.config import AppConfig, PoolConfig
from serve_app.extensions import BUILT_IN

if TYPE_CHECKING:  # it imports Ray, which an API does not need
    from serve_app.speech.replica_synthesizer import Deployed

BUILT_IN_FOLDER, DEFAULT = "serve_app.extensions", "default"


class Charge(Enum):
    """What a GET costs its caller. The door counts all other methods."""

    NOTHING = "nothing"
    REQUEST = "a request"
    STREAM = "a request, and a stream while it lasts"  # it reads the store or encodes audio


@dataclass(frozen=True, slots=True)
class Route:
    """One HTTP route. `answer` takes the SpeechService, then any arguments that FastAPI gives an endpoint; the `answer`
    of a `POST` returns a Response.
    """

    operation: str  # method and path: "POST /v1/speak"
    answer: Callable[..., Awaitable[object]]
    summary: str | None = None  # None: /docs does not show it
    docs: dict[str, Any] = field(default_factory=dict)  # added to the OpenAPI that FastAPI makes
    json_field: str | None = None  # of a JsonRoute. None: it answers all other requests of its operation
    charge: Charge = Charge.REQUEST  # where its method is GET or HEAD


@dataclass(frozen=True, slots=True)
class JsonRoute(Route):
    """A route whose `answer` is given the body: it takes the SpeechService, the request, and the fields of the body's
    JSON object. The body is read within the limits of size, time and room.

    Several dialects may have one for the same operation. All but one of them have a `json_field`: they answer the
    requests whose body has that field.
    """

    answer: Callable[[SpeechService, Request, dict[str, object]], Awaitable[Response]]


class SocketKind(Protocol):
    """A class whose objects serve a WebSocket each."""

    subprotocol: ClassVar[str | None]  # its name in the handshake

    @classmethod
    async def run(cls, socket: WebSocket, service: SpeechService) -> None:
        """Accepts a client and serves it."""
        ...


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
        return Sample(**{attribute.name: _filled(getattr(self, attribute.name), words) for attribute in fields(self)})


@dataclass(frozen=True, slots=True)
class Dialect:
    """One family of clients. The API, its door, `check-client`, the fuzzers and the tests read this declaration.

    The order of the dialects (`dialects_of`, then BUILT_IN) decides three things. The page at /docs shows routes in
    this order. If several paths fit a request, as `/voices/design` and `/voices/{voice_id}` do, the first one answers.
    If a request has several keys, the one in `Authorization` counts, else the first of these `key_headers`.
    """

    name: str
    routes: tuple[Route, ...] = ()
    sockets: tuple[tuple[str, type[SocketKind]], ...] = ()  # by path; a path may have one for each subprotocol
    heading: str | None = None  # in /docs; None: the name
    key_headers: tuple[str, ...] = ()  # beside `Authorization`
    key_protocols: tuple[str, ...] = ()  # a key stands behind one of these in a subprotocol: browsers send no headers
    sample: Sample | None = None

    @property
    def paths(self) -> list[str]:
        """Those of which a request is this dialect's before its body is read."""
        routes = [route.operation.split()[1] for route in self.routes if route.json_field is None]
        return [*routes, *(path for path, _ in self.sockets)]


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """A deployment that an extension adds. `build_app` makes it."""

    name: str
    replica: type
    pool: PoolConfig
    max_ongoing_requests: int
    arguments: tuple[object, ...]  # of the constructor


@dataclass(frozen=True, slots=True)
class Extension:
    """One feature around the core: a folder that the core does not import."""

    name: str
    requires: tuple[str, ...] = ()  # names of other extensions
    dialects: tuple[Dialect, ...] = ()
    # Called once by `build_app`, with the models as the ingress has them.
    deploy: "Callable[[AppConfig, Sequence[Deployed]], DeploymentSpec] | None" = None
    # Called once in each ingress replica, with Ray Serve's handle of what `deploy` added. Routes find the result in
    # `SpeechService.opened`, under the extension's name.
    open: Callable[[Any], object] | None = None


def load_extensions(selected: Sequence[str] | None = None) -> tuple[Extension, ...]:
    """The extensions that `api.extensions` selects, in its order; all built-in ones without it.

    Raises StartError for an unknown or repeated name, for one that cannot be imported, and for a missing requirement.
    """
    listed = (DEFAULT,) if selected is None else selected
    names = [each for name in listed for each in (BUILT_IN if name == DEFAULT else (name,))]
    extensions = tuple(map(_load, names))
    loaded = [extension.name for extension in extensions]
    if repeated := next((name for name in loaded if loaded.count(name) > 1), None):
        raise StartError(f"api.extensions: {repeated!r} is there twice: delete one of them")
    for extension in extensions:
        if missing := [name for name in extension.requires if name not in loaded]:
            raise StartError(f"api.extensions: {extension.name} requires {', '.join(missing)}: add them to the list")
    return extensions


def _load(name: str) -> Extension:
    if name in BUILT_IN:
        extension: Extension = import_module(f"{BUILT_IN_FOLDER}.{name}.extension").EXTENSION
        return extension
    module, _, attribute = name.partition(":")
    if not attribute:
        known = ", ".join((DEFAULT, *BUILT_IN))
        raise StartError(f"api.extensions: {name!r} is unknown. Use {known}, or package.module:EXTENSION of your own")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise StartError(
            f"api.extensions: {name!r} cannot be imported ({error}): the package must be installed on every node that "
            "builds the application or runs an ingress replica"
        ) from None
    if not isinstance(found, Extension):
        raise StartError(f"api.extensions: {name!r} is a {type(found).__name__}: name an object of the class Extension")
    return found


def check_places(extensions: Iterable[Extension]) -> None:
    """Raises StartError if two extensions have the same place and no field or subprotocol tells them apart."""
    owners: dict[object, str] = {}
    for extension in extensions:
        for dialect in extension.dialects:
            routes = [(route.operation, route.json_field) for route in dialect.routes]
            for place in (*routes, *((path, kind.subprotocol) for path, kind in dialect.sockets)):
                if (owner := owners.setdefault(place, extension.name)) != extension.name:
                    both = f"{owner} and {extension.name} both have {place[0]}"
                    raise StartError(f"api.extensions: {both}: leave one of them out")


def http_router(dialects: Iterable[Dialect], service: SpeechService) -> APIRouter:
    """All HTTP routes, in the order of `dialects`."""
    operations: dict[str, dict[str | None, tuple[Dialect, Route]]] = {}  # by `json_field`
    for dialect in dialects:
        for route in dialect.routes:
            sharing = operations.setdefault(route.operation, {})
            assert route.json_field not in sharing, f"{dialect.name}: {route.operation} is another's: see JsonRoute"
            sharing[route.json_field] = dialect, route
    router = APIRouter()
    for operation, sharing in operations.items():
        dialect, route = sharing[None]
        json_routes = {name: (owner, one) for name, (owner, one) in sharing.items() if isinstance(one, JsonRoute)}
        assert len(sharing) == 1 or len(json_routes) == len(sharing), (
            f"{operation} is shared: each has to be a JsonRoute"
        )
        answer = partial(_answer_by_field, json_routes) if json_routes else route.answer
        method, path = operation.split()
        returns: dict[str, Any] = {"response_class": Response} if method == "POST" else {"response_model": None}  # JSON
        router.add_api_route(
            path,
            _endpoint(route, partial(answer, service), dialect.name),
            methods=[method],
            tags=[dialect.heading or dialect.name],
            summary=route.summary,
            include_in_schema=route.summary is not None,
            openapi_extra=route.docs,
            dependencies=charging(route.charge if method in ("GET", "HEAD") else Charge.NOTHING),
            **returns,
        )
    return router


def charging(charge: Charge) -> list[params.Depends]:
    """The dependencies of a GET route that counts so."""

    async def count(request: Request) -> None:
        state = state_of(request)
        state.caller.count_request()
        if charge is Charge.STREAM:
            state.held.enter_context(state.caller.stream())

    return [] if charge is Charge.NOTHING else [Depends(count)]


def socket_router(dialects: Iterable[Dialect], service: SpeechService) -> APIRouter:
    """Routes of all WebSockets. A handshake on any other path gets a 404; Starlette's own answer would be a 403."""
    kinds: dict[str, dict[type[SocketKind], str]] = {}
    for dialect in dialects:
        for path, kind in dialect.sockets:
            kinds.setdefault(path, {})[kind] = dialect.name
    router = APIRouter()
    for path, of_path in kinds.items():
        router.add_api_websocket_route(path, partial(_converse, of_path, service))
    router.add_api_websocket_route("/{path:path}", _refuse_unknown)
    return router


def _endpoint(route: Route, bound: partial[Awaitable[object]], dialect: str) -> Callable[..., Awaitable[object]]:
    setattr(bound, ENDPOINT_DIALECT, dialect)
    bound.__name__, bound.__doc__ = route.answer.__name__, route.answer.__doc__  # type: ignore[attr-defined]  # shown by /docs
    return bound


async def _answer_by_field(
    sharing: Mapping[str | None, tuple[Dialect, JsonRoute]], service: SpeechService, request: Request
) -> Response:
    """Answers with the route whose `json_field` the body has, else with the one that has none."""
    fields = await service.read_fields(request)
    dialect, route = sharing[next((name for name in sharing if name in fields), None)]
    state_of(request).record.dialect = dialect.name
    return await route.answer(service, request, fields)


async def _converse(kinds: Mapping[type[SocketKind], str], service: SpeechService, socket: WebSocket) -> None:
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
