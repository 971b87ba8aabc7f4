"""The interface between the core and its extensions: what an extension declares, and what it is given."""

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
from serve_app.api.request_record import RequestRecord
from serve_app.api.resolve.resolver import Draft, Resolver
from serve_app.api.speech_service import SpeechService
from serve_app.config import ApiSettings, AppConfig, PoolConfig
from serve_app.speech.model_state import ModelState, ready
from serve_app.speech.observers import Observer
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModels

if TYPE_CHECKING:  # it imports Ray, which an API does not need
    from serve_app.speech.replica_synthesizer import Deployed


class Charge(Enum):
    """The cost of a GET for its caller. All other methods count as one request."""

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
    charge: Charge = Charge.REQUEST  # if its method is GET or HEAD


@dataclass(frozen=True, slots=True)
class JsonRoute(Route):
    """A route whose `answer` gets the parsed body: it takes the SpeechService, the request, and the fields of the
    body's JSON object. The body is read within the limits of size, time and room.

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
    audio_field: str = ""  # field of WebSocket messages with audio in base64; "": audio is in binary messages
    clients: tuple[str, ...] = ()  # how to configure each client that was tried

    def filled(self, **words: str) -> "Sample":
        return Sample(**{attribute.name: _filled(getattr(self, attribute.name), words) for attribute in fields(self)})


@dataclass(frozen=True, slots=True)
class Dialect:
    """One family of clients. The API, access control, `check-client`, the fuzzers and the tests read this.

    The order of the dialects (`dialects_of`, then BUILT_IN) decides three things. The page at /docs shows routes in
    this order. If several paths fit a request, as `/voices/design` and `/voices/{voice_id}` do, the first one answers.
    If a request has several keys, the one in `Authorization` counts, else the first of these `key_headers`.
    """

    name: str
    routes: tuple[Route, ...] = ()
    sockets: tuple[tuple[str, type[SocketKind]], ...] = ()  # by path; a path may have one for each subprotocol
    heading: str | None = None  # in /docs; None: the name
    key_headers: tuple[str, ...] = ()  # in addition to `Authorization`
    key_protocols: tuple[str, ...] = ()  # prefixes of a key in a subprotocol, because browsers send no headers
    public_paths: tuple[str, ...] = ()  # readable without a key
    sample: Sample | None = None

    @property
    def paths(self) -> list[str]:
        """Paths that identify this dialect without reading the body."""
        routes = [route.operation.split()[1] for route in self.routes if route.json_field is None]
        return [*routes, *(path for path, _ in self.sockets)]


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """A deployment that an extension adds. `build_app` makes it."""

    name: str
    replica: str  # "package.module:Class", imported when the deployment is made: it may need Ray
    pool: PoolConfig
    max_ongoing_requests: int
    arguments: tuple[object, ...]  # of the constructor


async def forget_nothing(_: tuple[bytes, ...]) -> None:
    """Does nothing: without replicas, nothing keeps deleted voices."""


@dataclass(frozen=True, slots=True)
class Node:
    """An ingress replica's knowledge of its node and of the pools."""

    is_running: Callable[[str], bool]  # whether each pool of a model has a replica that takes requests
    is_ready: Callable[[], bool]  # whether a request can be spoken; with a pool at zero it can, after a start
    scrape: Callable[[], bytes]  # all metrics of this node's processes, in Prometheus' text format; blocks
    state: Callable[[str], ModelState] = lambda model: ready()
    sizes: Callable[[], Mapping[str, tuple[int, int]]] = dict  # replicas wanted and running, by pool
    # Notes that ingress replicas leave for each other. Each replica makes its own whenever it checks the pools. Reading
    # the notes of the others blocks.
    share_note: Callable[[Callable[[], bytes]], None] = lambda make: None
    notes: Callable[[], Sequence[bytes]] = tuple
    num_nodes: int = 1
    address: str = "127.0.0.1"  # for replicas on other nodes
    # Drops the data that all other replicas keep for deleted voices, given the voices' keys. Raises NotReady.
    forget: Callable[[tuple[bytes, ...]], Awaitable[None]] = forget_nothing
    replica: str = ""  # the name of the ingress replica
    log_folder: Path | None = None  # of Ray Serve


@dataclass(frozen=True, slots=True)
class Opening:
    """The arguments of `Extension.open`."""

    settings: ApiSettings
    models: SpeechModels
    dialects: tuple[Dialect, ...]  # of the core and of all extensions
    opened: Mapping[str, object]  # results of `open` of the extensions before it, by name
    node: Node | None = None  # None: the API serves no replicas, as in a test
    handle: Any = None  # Ray Serve's handle of what `deploy` added


class Opened:
    """The state of an extension in one ingress replica: the result of `Extension.open`. Override what you need."""

    def join(self, resolver: Resolver) -> None:
        """Called once: install the steps that this extension runs for every request."""

    async def resolve(self, draft: Draft) -> Draft:
        """The last step for every utterance, after this step of the extensions before it. If it raises, the request
        gets a 500 that names the extension, or the reply to a TalkrayError.
        """
        return draft

    def observe(self, utterance: Utterance, info: ModelInfo) -> Observer | None:
        """Called before an utterance is spoken. The observer sees each chunk."""
        return None

    def discard(self, utterance: Utterance) -> None:
        """Called if an utterance that was spoken is not sent after all."""

    def grant(self, credential: str, scope: Scope) -> Granted | None:
        """Called with a credential that may not be an API key. Returns the key that it represents in this request, or
        None if it does not belong to this extension. Raises Unauthorized with the reason.
        """
        return None

    def receive(self, record: RequestRecord) -> None:
        """Called with the record of each request at its end."""

    def follow(self) -> None:
        """Called on the event loop: once before any request, then every few seconds."""

    def close(self) -> None:
        """Called before the process ends; blocks."""


@dataclass(frozen=True, slots=True)
class Extension:
    """One feature around the core: a folder that the core does not import."""

    name: str
    settings: type[Strict] = Strict  # of `api.NAME`
    requires: tuple[str, ...] = ()  # names of other extensions
    dialects: tuple[Dialect, ...] = ()
    # Called once by `build_app`, with the models as the ingress has them.
    deploy: "Callable[[AppConfig, Sequence[Deployed]], DeploymentSpec] | None" = None
    # Called once in each ingress replica. Routes find the result by `SpeechService.opened_by`.
    open: Callable[[Opening], object] | None = None


def open_all(extensions: Sequence[Extension], opening: Opening, added: Mapping[str, object]) -> dict[str, object]:
    """Open all extensions except those in `opening.opened`, and return all states by extension name. An extension opens
    after those that it requires. `added`: handles of the deployments they add.
    """
    by_name = {extension.name: extension for extension in extensions}
    states = {name: state for name, state in opening.opened.items() if name in by_name}

    def open_one(extension: Extension) -> None:
        for name in extension.requires:
            open_one(by_name[name])
        if extension.open is not None and extension.name not in states:
            own = replace(opening, opened=states, handle=added.get(extension.name))
            states[extension.name] = extension.open(own)

    for extension in extensions:
        open_one(extension)
    return states


def _filled(value: Any, words: Mapping[str, str]) -> Any:
    match value:
        case str():
            return Template(value).safe_substitute(words)
        case dict():
            return {name: _filled(item, words) for name, item in value.items()}
        case list() | tuple():
            return type(value)(_filled(item, words) for item in value)
    return value
