"""Interface between the core and its extensions: an extension's declarations, and the objects that it receives."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope
from starlette.websockets import WebSocket

from deployments.config import Strict
from deployments.protocol import ModelInfo
from serve_app.api.access.callers import Granted
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.request_record import RequestRecord
from serve_app.api.resolve.resolver import RequestHooks
from serve_app.api.speech_service import SpeechService
from serve_app.config import ApiSettings, AppConfig, PoolConfig
from serve_app.extensions import BUILT_IN
from serve_app.speech.model_state import ModelState, ready
from serve_app.speech.observers import Observer
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModels

if TYPE_CHECKING:  # imports Ray, which the API does not need
    from serve_app.speech.replica_synthesizer import Deployed


class Charge(Enum):
    """How a GET request is charged to its caller. Requests with other methods count as one request."""

    NOTHING = "nothing"
    REQUEST = "a request"
    STREAM = "a request, and a stream while it lasts"  # for routes that read stored data or encode audio


@dataclass(frozen=True, slots=True)
class Route:
    """HTTP route. `answer` takes the SpeechService and any arguments that FastAPI passes to an endpoint. For a `POST`,
    `answer` returns a Response.
    """

    operation: str  # method and path: "POST /v1/speak"
    answer: Callable[..., Awaitable[object]]
    summary: str | None = None  # None: hidden in /docs
    docs: dict[str, Any] | Callable[[type[SpeechBody]], dict[str, Any]] = field(default_factory=dict)  # for OpenAPI
    json_field: str | None = None  # for a JsonRoute; None: answers all other requests to the operation
    charge: Charge = Charge.REQUEST  # applies to GET and HEAD


@dataclass(frozen=True, slots=True)
class JsonRoute(Route):
    """Route whose `answer` takes the SpeechService, the request, and the fields of the body's JSON object. The body is
    read under size, time and memory limits.

    Several dialects may share an operation. All but one of their routes then have a `json_field`, and answer requests
    whose bodies contain this field.
    """

    answer: Callable[[SpeechService, Request, dict[str, object]], Awaitable[Response]]


class SocketKind(Protocol):
    """Class whose instances each serve one WebSocket."""

    subprotocol: ClassVar[str | None]  # name in the handshake

    @classmethod
    async def run(cls, socket: WebSocket, service: SpeechService) -> None:
        """Accept and serve one WebSocket."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample client request. Placeholders are `$text`, `$voice`, `$url` for the server's address, and `$sockets` for
    the same address as a ws:// URL.
    """

    path: str  # includes the query
    messages: tuple[Mapping[str, object], ...] = ()  # JSON messages on a WebSocket
    body: Mapping[str, object] | None = None  # JSON body of a POST
    protocols: tuple[str, ...] = ()  # subprotocols that the handshake offers
    audio_field: str = ""  # field with base64 audio in WebSocket messages; "": audio is in binary messages
    clients: tuple[str, ...] = ()  # configuration for each tested client

    def filled(self, **words: str) -> "Sample":
        return Sample(**{attribute.name: _filled(getattr(self, attribute.name), words) for attribute in fields(self)})


@dataclass(frozen=True, slots=True)
class Dialect:
    """Protocol of one family of clients. The API, access control, `check-client`, the fuzzers and the tests use it.

    The order of the dialects (`dialects_of`, then BUILT_IN) has three effects. /docs lists routes in this order. If
    several paths match a request, as `/voices/design` and `/voices/{voice_id}` do, the first path answers. If a request
    has several keys, the key in `Authorization` takes precedence, then the first of these `key_headers`.
    """

    name: str
    routes: tuple[Route, ...] = ()
    sockets: tuple[tuple[str, type[SocketKind]], ...] = ()  # by path; a path may have one kind per subprotocol
    heading: str | None = None  # heading in /docs; None: the name
    key_headers: tuple[str, ...] = ()  # in addition to `Authorization`
    key_parameters: tuple[str, ...] = ()  # query parameters of WebSockets with keys
    key_protocols: tuple[str, ...] = ()  # prefixes of keys in subprotocols, because browsers cannot set headers
    public_paths: tuple[str, ...] = ()  # readable without a key
    sample: Sample | None = None

    @property
    def paths(self) -> list[str]:
        """Paths that identify this dialect without reading the body."""
        routes = [route.operation.split()[1] for route in self.routes if route.json_field is None]
        return [*routes, *(path for path, _ in self.sockets)]


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """Deployment that an extension adds to the application. `build_app` creates it."""

    name: str
    replica: str  # "package.module:Class", imported by `build_app` because it may need Ray
    pool: PoolConfig
    max_ongoing_requests: int
    arguments: tuple[object, ...]  # constructor arguments


async def forget_nothing(_: tuple[bytes, ...]) -> None:
    """Do nothing, because without replicas no process holds data about deleted voices."""


@dataclass(frozen=True, slots=True)
class Node:
    """Information about the pools and an ingress replica's node."""

    is_running: Callable[[str], bool]  # whether each pool of a model has a replica that accepts requests
    is_ready: Callable[[], bool]  # whether requests are accepted, possibly after starting a pool that is scaled to zero
    scrape: Callable[[], bytes]  # returns all metrics of this node's processes, in the Prometheus text format; blocks
    state: Callable[[str], ModelState] = lambda model: ready()
    sizes: Callable[[], Mapping[str, tuple[int, int]]] = dict  # numbers of requested and running replicas, by pool
    # Notes that ingress replicas leave for each other. Each replica writes its note whenever it checks the pools.
    # Reading other replicas' notes blocks.
    share_note: Callable[[Callable[[], bytes]], None] = lambda make: None
    notes: Callable[[], Sequence[bytes]] = tuple
    num_nodes: int = 1
    address: str = "127.0.0.1"  # address for replicas on other nodes
    # Makes all other replicas drop the data of deleted voices, given the voices' keys. Raises NotReady.
    forget: Callable[[tuple[bytes, ...]], Awaitable[None]] = forget_nothing
    replica: str = ""  # name of the ingress replica
    log_folder: Path | None = None  # Ray Serve's log folder


@dataclass(frozen=True, slots=True)
class OpenContext:
    """Arguments of `Extension.open`."""

    settings: ApiSettings
    models: SpeechModels
    dialects: tuple[Dialect, ...]  # dialects of the core and of all extensions
    opened: Mapping[str, object]  # results of `open` of earlier extensions, by name
    node: Node | None = None  # None: the API has no replicas, as in a test
    handle: Any = None  # Ray Serve handle of the deployment that `deploy` added


class ExtensionState(RequestHooks):
    """An extension's state in one ingress replica, as returned by `Extension.open`. Override methods as needed.

    Its request hooks apply in this replica only. Jobs use those in `Extension.hooks`.
    """

    def observe(self, utterance: Utterance, info: ModelInfo) -> Observer | None:
        """Return an observer of an utterance's PCM chunks, or None. Called before synthesis, but not for text without
        speech or for jobs. Speech that fails or is abandoned has no `end`, but `receive` gets its request's record.
        """
        return None

    def grant(self, credential: str, scope: Scope) -> Granted | None:
        """Return the key that a credential represents in this request, or None if the credential belongs to another
        extension. Raises Unauthorized with the reason.
        """
        return None

    def receive(self, record: RequestRecord) -> None:
        """Process the record of a finished request."""

    def follow(self) -> None:
        """Do periodic work. Called on the event loop before the first request, then every few seconds."""

    def close(self) -> None:
        """Release resources before the process ends. May block."""


@dataclass(frozen=True, slots=True)
class Extension:
    """Feature outside the core, in a folder that the core does not import."""

    name: str
    settings: type[Strict] = Strict  # settings class of `api.NAME`
    requires: tuple[str, ...] = ()  # names of other extensions
    dialects: tuple[Dialect, ...] = ()
    # `build_app` calls this once, with the models that are passed to the ingress.
    deploy: "Callable[[AppConfig, Sequence[Deployed]], DeploymentSpec] | None" = None
    # Each ingress replica calls this once. Routes get the result, any object, from `SpeechService.opened_by`. The core
    # only calls the methods of an `ExtensionState`.
    open: Callable[[OpenContext], object] | None = None
    # Request hooks without state, for ingress replicas and jobs.
    hooks: RequestHooks | None = None


def in_order(extensions: Sequence[Extension]) -> list[Extension]:
    """Return the extensions in the order in which their hooks run: custom ones last, and each after those that it
    requires.
    """
    by_name, ordered = {extension.name: extension for extension in extensions}, dict[str, Extension]()

    def add(extension: Extension) -> None:
        for name in extension.requires:
            add(by_name[name])
        ordered.setdefault(extension.name, extension)

    for extension in sorted(extensions, key=lambda extension: extension.name not in BUILT_IN):
        add(extension)
    return [*ordered.values()]


def open_all(extensions: Sequence[Extension], context: OpenContext, added: Mapping[str, object]) -> dict[str, object]:
    """Open all extensions except those in `context.opened`, and return all states by extension name. `extensions` are
    in order: see `in_order`. `added`: handles of the deployments that extensions add.
    """
    states: dict[str, object] = {}
    for extension in extensions:
        if extension.name in context.opened:
            states[extension.name] = context.opened[extension.name]
        elif extension.open is not None:
            own = replace(context, opened=states, handle=added.get(extension.name))
            states[extension.name] = extension.open(own)
    return states


def hooks_of(extensions: Sequence[Extension], states: Mapping[str, object]) -> list[tuple[str, RequestHooks]]:
    """Return the hooks of extensions and of their states, in the same order. Each comes with the extension's name."""
    of_each = ((extension.name, (extension.hooks, states.get(extension.name))) for extension in extensions)
    return [(name, each) for name, both in of_each for each in both if isinstance(each, RequestHooks)]


def _filled(value: Any, words: Mapping[str, str]) -> Any:
    match value:
        case str():
            return Template(value).safe_substitute(words)
        case dict():
            return {name: _filled(item, words) for name, item in value.items()}
        case list() | tuple():
            return type(value)(_filled(item, words) for item in value)
    return value
