"""Routing of all dialects' HTTP routes and WebSockets."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, params
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from deployments.errors import StartError
from serve_app.api import openai
from serve_app.api.context import ENDPOINT_DIALECT, state_of
from serve_app.api.error_replies import translate
from serve_app.api.speech_service import SpeechService
from serve_app.config import ApiSettings
from serve_app.extension import Charge, Dialect, Extension, JsonRoute, Route, SocketKind


def dialects_of(extensions: Iterable[Extension]) -> tuple[Dialect, ...]:
    """Return the core's dialects, then those of the extensions. Raises StartError if two extensions share a path."""
    core = Extension("the core", dialects=(openai.SPEECH_DIALECT, openai.LIST_DIALECT))
    _check_places(every := (core, *extensions))
    return tuple(dialect for extension in every for dialect in extension.dialects)


def _check_places(extensions: Iterable[Extension]) -> None:
    """Raise StartError if two routes or sockets share a path that no field or subprotocol distinguishes, if a shared
    operation has no JsonRoute without `json_field`, or if an extension has the same name as a setting.
    """
    owners: dict[tuple[str, str | None], str] = {}
    kinds: dict[str, set[bool]] = {}  # by operation: whether its routes are JsonRoutes
    for extension in extensions:
        if extension.name in ApiSettings.model_fields:
            raise StartError(f"api.extensions: {extension.name} is also the name of a setting. Rename the extension")
        for dialect in extension.dialects:
            routes = [(route.operation, route.json_field) for route in dialect.routes]
            for place in (*routes, *((path, kind.subprotocol) for path, kind in dialect.sockets)):
                if place in owners:
                    both = f"{owners[place]} and {extension.name} both have {place[0]}"
                    raise StartError(f"api.extensions: {both}. Remove one of them")
                owners[place] = extension.name
            for route in dialect.routes:
                kinds.setdefault(route.operation, set()).add(isinstance(route, JsonRoute))
    for (operation, field), owner in owners.items():
        if field is not None and kinds.get(operation) == {True, False}:
            raise StartError(f"api.extensions: {owner} shares {operation} with a route that is not a JsonRoute")
        if " " in operation and (operation, None) not in owners:  # sockets have no method
            raise StartError(f"api.extensions: {owner} has {operation} only with json_field. Add a route without it")


def http_router(dialects: Iterable[Dialect], service: SpeechService) -> APIRouter:
    """Create all HTTP routes in the order of `dialects`, but those with fewer placeholders in their path first."""
    operations: dict[str, dict[str | None, tuple[Dialect, Route]]] = {}  # by `json_field`
    for dialect in dialects:
        for route in dialect.routes:
            operations.setdefault(route.operation, {})[route.json_field] = dialect, route
    router = APIRouter()
    for operation, sharing in sorted(operations.items(), key=lambda each: each[0].count("{")):
        dialect, route = sharing[None]
        json_routes = {name: (owner, one) for name, (owner, one) in sharing.items() if isinstance(one, JsonRoute)}
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
            openapi_extra=route.docs(service.resolver.body) if callable(route.docs) else route.docs,
            dependencies=charging(route.charge if method in ("GET", "HEAD") else Charge.NOTHING),
            **returns,
        )
    return router


def charging(charge: Charge) -> list[params.Depends]:
    """Return the dependencies that apply `charge` to a GET route."""

    async def count(request: Request) -> None:
        state = state_of(request)
        state.caller.count_request()
        if charge is Charge.STREAM:
            state.exit_stack.enter_context(state.caller.stream())

    return [] if charge is Charge.NOTHING else [Depends(count)]


def socket_router(dialects: Iterable[Dialect], service: SpeechService) -> APIRouter:
    """Create the routes of all WebSockets. A handshake on any other path gets status 404 instead of Starlette's 403."""
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
    """Answer with the route whose `json_field` is in the body, or with the route that has none."""
    fields = await service.read_fields(request)
    dialect, route = sharing[next((name for name in sharing if name in fields), None)]
    state_of(request).record.dialect = dialect.name
    return await route.answer(service, request, fields)


async def _converse(kinds: Mapping[type[SocketKind], str], service: SpeechService, socket: WebSocket) -> None:
    """Serve the socket using the kind whose subprotocol the client offers, or the kind that has no subprotocol. `kinds`
    maps each kind to the name of its dialect.
    """
    offered = socket.scope["subprotocols"]
    named = next((kind for kind in kinds if kind.subprotocol in offered), None)
    kind = named or next(kind for kind in kinds if kind.subprotocol is None)
    state_of(socket).record.dialect = kinds[kind]
    await kind.run(socket, service)


async def refuse_handshake(socket: WebSocket, error: Exception, *, reason_header: str | None = None) -> None:
    """Reject a WebSocket handshake with an HTTP status. Some clients read the message from `reason_header`."""
    reply = translate(error)
    state_of(socket).record.error = reply.code
    response = reply.response()
    if reason_header is not None:
        response.headers[reason_header] = reply.message.encode("ascii", "replace").decode().replace("\n", " ")
    await socket.send_denial_response(response)


async def _refuse_unknown(socket: WebSocket) -> None:
    await refuse_handshake(socket, HTTPException(404))
