import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import BaseRoute
from starlette.types import Scope

from deployments.errors import Overloaded
from deployments.serving import metrics
from serve_app.api.access import access_control
from serve_app.api.access.callers import Caller
from serve_app.api.docs_page import DOCS_PATHS
from serve_app.api.error_replies import close_reason
from serve_app.api.headers import UNBUFFERED_HEADERS
from serve_app.cli.key_file import create_key
from serve_app.config import AccessSettings, AdmissionSettings, ApiSettings
from serve_app.extension import Node
from serve_app.extensions.voices.settings import VoiceSettings
from tests.serve_app import asgi
from tests.serve_app.extensions.client import SPEAK, Socket, code_of
from tests.serve_app.fake import FakeSynthesizer, utterance
from tests.serve_app.one_model import client_of, one_api
from tools.suites.rows import DIALECTS, is_here

pytestmark = pytest.mark.anyio
PATHS = DOCS_PATHS.union(path for dialect in DIALECTS for path in dialect.public_paths)

SPEECH = "/v1/audio/speech"
BODY = {"model": "tts-1", "input": "Hello", "voice": "alloy", "response_format": "pcm"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def key(file: Path) -> str:
    return create_key(file, "ada")


def surface(synthesizer: FakeSynthesizer | None = None, **access: object) -> FastAPI:
    settings = ApiSettings(access=AccessSettings.model_validate(access))
    return one_api(synthesizer or FakeSynthesizer(script=utterance()), settings)


async def ask(api: FastAPI, method: str = "POST", path: str = SPEECH, **headers: str) -> httpx.Response:
    async with client_of(api) as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await client.request(method, path, json=BODY if method == "POST" else None, headers=named)


@pytest.mark.parametrize("path", sorted(access_control.EXEMPT | PATHS))
async def test_only_who_reads_probes_and_lists_needs_no_key(file: Path, key: str, path: str) -> None:
    api = surface(keys_file=file)
    wrong = key[:-1] + ("A" if key[-1] == "B" else "B")
    for offered in ({}, {"authorization": "Bearer unused"}, {"xi_api_key": wrong}):  # none, unused, wrong
        assert (await ask(api, "GET", path, accept="text/html", **offered)).status_code == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert (await ask(api, method, path)).status_code == 401, method
        stores = (method, path) == ("POST", "/v1/audio/voices")
        assert (await ask(api, method, path, xi_api_key=key)).status_code == (400 if stores else 405), method
    async with asgi.websocket(api, path) as connection:
        assert (await connection.next())["status"] == 401


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1", "/metrics", "/status", "/docs/nothing", "/v1/nothing", "/health/"]
)
async def test_everything_else_does(file: Path, key: str, path: str) -> None:
    assert (await ask(surface(keys_file=file), "GET", path)).status_code == 401


@pytest.mark.parametrize(
    "path", ["//v1/audio/speech", "///v1//audio///speech", "/v1/audio/speech", "/health//../v1/audio/speech"]
)
async def test_no_spelling_of_a_path_goes_round_the_key_or_the_limit(file: Path, path: str) -> None:
    limited = create_key(file, "limited", requests_per_minute=1)
    api = surface(keys_file=file)
    is_there = ".." not in path
    own = {"xi-api-key": limited}
    for headers, status in (({}, 401), (own, 200 if is_there else 404), (own, 429)):
        async with asgi.http(api, "POST", path, body=BODY, headers=headers) as connection:
            assert (await connection.answer()).status == status


async def test_slashes_collapse_before_a_public_path_is_looked_up(file: Path, key: str) -> None:
    api = surface(keys_file=file)
    spellings = {"//health": 200, "//v1//audio/voices": 200, "/docs": 200, "//docs": 200, "//v1/models": 401}
    spellings |= {"/./health": 401, "/x/../health": 401, "/health/.": 401, "/%2Fhealth": 401, "/HEALTH": 401}
    for path, status in spellings.items():
        for method in ("GET", "HEAD"):
            async with asgi.http(api, method, path, headers={}) as connection:
                assert (await connection.answer()).status == status, path


async def test_without_a_key_file_nobody_is_asked() -> None:
    assert (await ask(surface(), Authorization="Bearer unused")).status_code == 200


async def test_a_stream_counts_until_it_is_left(file: Path) -> None:
    key = create_key(file, "ada", max_streams=1)
    synthesizer = FakeSynthesizer(script=[*utterance()[:1], asyncio.Event()])
    api = surface(synthesizer, keys_file=file)
    async with asgi.http(api, "POST", SPEECH, body=BODY, headers={"xi-api-key": key}) as connection:
        assert (await connection.next())["status"] == 200
        assert (await ask(api, xi_api_key=key)).status_code == 429
        assert (await ask(api, "GET", "/v1/models", xi_api_key=key)).status_code == 200
        connection.receive({"type": "http.disconnect"})
        await connection.task
    synthesizer.script = utterance()
    assert (await ask(api, xi_api_key=key)).status_code == 200


def socket(
    api: FastAPI, *, query: str = "", protocols: tuple[str, ...] = (), denial: bool = True, **headers: str
) -> asgi.Connection:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asgi.websocket(api, f"{SPEECH}/ws?{query}", headers=named, subprotocols=protocols, denial=denial)


def _ways(key: str) -> Iterator[tuple[dict[str, object], str | None]]:
    yield {"Authorization": f"Token {key}"}, None
    for dialect in DIALECTS:
        yield from (({"query": f"model=x&{name}={key}"}, None) for name in dialect.key_parameters)
        for prefix in dialect.key_protocols:
            yield {"protocols": ("realtime", f"{prefix}{key}", "openai-beta.realtime-v1")}, "realtime"
    yield {"protocols": ("token", key)}, "token"
    yield {"protocols": ("session-id", "any", "bearer", key)}, "session-id"
    yield {"protocols": (key,)}, None


async def test_every_way_to_send_a_key_over_a_websocket(file: Path, key: str) -> None:
    api = surface(keys_file=file)
    for fields, protocol in _ways(key):
        async with socket(api, **fields) as connection:  # type: ignore[arg-type]
            accept = await connection.next()
            assert accept["type"] == "websocket.accept"
            assert accept.get("subprotocol") == protocol
    for fields, _ in _ways(key[:-1] + "?"):
        async with socket(api, **fields) as connection:  # type: ignore[arg-type]
            assert (await connection.next())["type"] == "websocket.http.response.start"


@pytest.mark.parametrize("protocols", [("token", "of-another-service"), ("Bearer", "x.y.z")])
async def test_a_server_without_keys_names_the_scheme_of_a_key(protocols: tuple[str, ...]) -> None:
    """Browsers and Node's `ws` close a socket that names none of the subprotocols that they offered."""
    async with socket(surface(), protocols=protocols) as connection:
        assert (await connection.next())["subprotocol"] == protocols[0]
    for unknown in (("graphql-ws",), ("token",), ("mqtt", "wamp")):  # that nobody here speaks
        async with socket(surface(), protocols=unknown) as connection:
            assert (await connection.next()).get("subprotocol") is None


async def test_a_websocket_without_a_key(file: Path, key: str) -> None:
    async with socket(surface(keys_file=file)) as connection:
        start, body = await connection.next(), await connection.next()
        assert start["status"] == 401
        assert json.loads(body["body"])["error"]["code"] == "invalid_api_key"
    async with socket(surface(keys_file=file), denial=False) as connection:
        assert await connection.next() == {"type": "websocket.close", "code": 1008, "reason": "invalid_api_key"}


async def test_what_is_asked_over_a_websocket_counts(file: Path, refusals: list[str]) -> None:
    key = create_key(file, "ada", requests_per_minute=3, max_streams=1)
    api = surface(keys_file=file)
    async with socket(api, xi_api_key=key) as connection:
        client = await Socket(connection).accepted()
        assert (await ask(api, xi_api_key=key)).status_code == 429  # the socket is the one stream
        assert refusals == ["key"]
        await speaks(client, times=2)
    async with socket(api, xi_api_key=key) as connection:
        await Socket(connection).accepted()


async def speaks(client: Socket, *, times: int) -> None:
    """So many times, and then no more."""
    for _ in range(times):
        client.send(SPEAK)
        assert (await client.utterance())[1]["type"] == "done"
    client.send(SPEAK)
    assert code_of(await client.event()) == ("rate_limit_exceeded", None)


async def test_cors_is_off_unless_pages_are_listed() -> None:
    preflight = {"Origin": "https://app.example.com", "Access-Control-Request-Method": "POST"}
    answer = await ask(surface(), "OPTIONS", **preflight)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


async def test_cors_for_the_pages_on_the_list(file: Path, key: str) -> None:
    api = surface(keys_file=file, allowed_origins=("https://app.example.com",))
    page = "https://app.example.com"
    asked = {"Method": "POST", "Headers": "authorization"}
    preflight = {"Origin": page, **{f"Access-Control-Request-{name}": asked[name] for name in asked}}
    allowed = await ask(api, "OPTIONS", **preflight)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, page)
    assert "access-control-allow-credentials" not in allowed.headers
    refused = await ask(api, Origin=page)  # the page may read why
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page)
    spoken = await ask(api, Origin=page, Authorization=f"Bearer {key}")
    told = {name for name in spoken.headers if name.startswith("x-")} - UNBUFFERED_HEADERS.keys()
    exposed = set(spoken.headers["access-control-expose-headers"].split(", "))
    assert {"x-seed", "x-model", "x-voice"} <= told <= exposed
    assert {"retry-after", "x-should-retry"} <= exposed
    assert (await ask(api, "OPTIONS", **preflight | {"Origin": "https://evil.example.com"})).status_code == 400


async def test_no_key_is_logged(file: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    api = surface(FakeSynthesizer(script=[ValueError("broken")]), keys_file=file)
    await ask(api, Authorization=f"Bearer {key}")
    await ask(api, Authorization=f"Bearer {key}x")
    async with socket(api, query=f"token={key}") as connection:
        client = await Socket(connection).accepted()
        client.send(SPEAK)
        assert code_of(await client.event()) == ("internal_error", None)
    assert "failed" in caplog.text
    assert key[10:] not in caplog.text
    assert BODY["input"] not in caplog.text


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reasons that `talkray_refusals_total` was given."""
    reasons: list[str] = []
    monkeypatch.setattr(metrics.REFUSALS, "record", lambda _, *, reason: reasons.append(reason))
    return reasons


def limited(file: Path, synthesizer: FakeSynthesizer | None = None, **admission: int) -> FastAPI:
    """Keys are asked for, and each address has limits as well."""
    settings = ApiSettings(
        access=AccessSettings(keys_file=file), admission=AdmissionSettings(trusted_proxies=0, **admission)
    )
    return one_api(synthesizer or FakeSynthesizer(script=utterance()), settings)


@pytest.mark.parametrize("full", ["address", "key", "server"])
@pytest.mark.parametrize("denial", [True, False])
async def test_a_socket_too_many_is_closed_with_1013_and_the_reason(file: Path, full: str, denial: bool) -> None:
    """Streams of the address and of the key are refused at the handshake; the server's when they are asked for."""
    key = create_key(file, "ada", max_streams=1 if full == "key" else None)
    limits = {"address": {"client_streams": 1}, "key": {}, "server": {"max_streams": 1}}[full]
    synthesizer = FakeSynthesizer(script=[asyncio.Event()])
    api = limited(file, synthesizer, **limits)
    async with socket(api, xi_api_key=key) as connection, socket(api, xi_api_key=key, denial=denial) as second:
        first = await Socket(connection).accepted()
        first.send(SPEAK)
        await synthesizer.waiting.wait()
        client = await Socket(second).accepted()
        if full == "server":
            client.send(SPEAK)
            assert code_of(await client.event()) == ("rate_limit_exceeded", None)
        await closed_as_overloaded(second)


@pytest.mark.parametrize("full", ["address", "key"])
async def test_an_utterance_too_many_closes_the_socket_with_1013(file: Path, full: str, refusals: list[str]) -> None:
    """Opening the socket is no utterance."""
    key = create_key(file, "ada", requests_per_minute=1 if full == "key" else None)
    api = limited(file, **({"client_requests_per_minute": 1} if full == "address" else {}))
    async with socket(api, xi_api_key=key) as connection:
        await speaks(await Socket(connection).accepted(), times=1)
        reason = await closed_as_overloaded(connection)
    assert f"This {'client' if full == 'address' else 'API key'} may make 1 requests per minute" in reason
    assert refusals == ["client" if full == "address" else "key"]
    assert (await ask(api, xi_api_key=key)).status_code == 429


async def closed_as_overloaded(connection: asgi.Connection) -> str:
    closed = await connection.next()
    assert (closed["type"], closed["code"]) == ("websocket.close", 1013)
    reason: str = closed["reason"]
    assert reason.startswith("overloaded, retry after ")
    return reason


class Server:
    """The API with limits, behind one trusted proxy; streams wait until they are let go."""

    def __init__(self, **limits: int) -> None:
        self.gate = asyncio.Event()
        self.synthesizer = FakeSynthesizer(script=[self.gate, *utterance(1)])
        self.api = one_api(self.synthesizer, ApiSettings(admission=AdmissionSettings(trusted_proxies=1, **limits)))

    def ask(self, address: str) -> asgi.Connection:
        return asgi.http(self.api, "POST", SPEECH, body=BODY, headers={"x-forwarded-for": address})

    async def status(self, address: str) -> int:
        async with self.ask(address) as connection:
            status: int = (await connection.next())["status"]
            return status


@pytest.mark.parametrize(
    ("address", "same", "other"),
    [
        ("10.0.0.1", "10.0.0.1", "10.0.0.2"),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::7", "2001:db8:0:2::1"),  # a /64 is one client
    ],
)
async def test_one_address_has_so_many_streams_and_another_its_own(address: str, same: str, other: str) -> None:
    server = Server(client_streams=1)
    async with server.ask(address) as connection:
        await server.synthesizer.waiting.wait()
        assert await server.status(same) == 429
        server.gate.set()
        assert await server.status(other) == 200
        assert (await connection.next())["status"] == 200
    assert await server.status(address) == 200


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:DB8:0:0:ffff:1:2:3", "2001:db8::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),  # as a socket of both families has it
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
    ],
)
def test_who_one_client_is(address: str, client: str) -> None:
    assert access_control.one_client(address) == client


async def test_a_full_server_does_not_parse_what_it_refuses() -> None:
    server = Server(max_streams=1)
    async with server.ask("10.0.0.1") as connection:
        await server.synthesizer.waiting.wait()
        async with asgi.http(server.api, "POST", SPEECH, body=["no object"]) as refused:
            assert (await refused.next())["status"] == 429
        server.gate.set()
        assert (await connection.next())["status"] == 200
    async with asgi.http(server.api, "POST", SPEECH, body=["no object"]) as wrong:
        assert (await wrong.next())["status"] == 400


# GETs that cost nothing, as probes, pages and lists from memory, and those that read the store or encode audio.
FREE = {"/health", "/ready", "/metrics", "/status", "/v1", "/v1/", "/v1/models", *PATHS, "/docs/{name}", "/page/{name}"}
FREE |= {"/docs/oauth2-redirect", "/v1/audio/voices", "/v1/voices", "/v2/voices", "/voices", "/voices/"}
STREAMS = {"/v1/audio/voices/{voice_id}/file", "/v1/audio/voice_consents/{consent_id}"}
STREAMS |= {"/v1/text-to-voice/{generated_voice_id}/stream", *(f"/pronunciation-dicts{end}" for end in ("", "/"))}
STREAMS |= {"/v1/pronunciation-dictionaries", "/pronunciation-dicts/{dictionary_id}"}
STREAMS |= {f"/v1/pronunciation-dictionaries/{{dictionary_id}}{end}" for end in ("", "/{version_id}/download")}
STREAMS |= {f"/v1/audio/jobs/{{job_id}}/{end}" for end in ("parts", "parts/{part}", "parts/{part}/words", "audio")}


def every_route(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """Also those of included routers, which FastAPI keeps as they are."""
    for route in routes:
        included = getattr(route, "original_router", None)
        yield from [route] if included is None else every_route(included.routes)


async def test_every_get_counts_as_its_route_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counted = Counter[str]()

    @contextmanager
    def stream(_: Caller) -> Iterator[None]:
        counted["streams"] += 1
        yield

    monkeypatch.setattr(Caller, "count_request", lambda _: counted.update(["requests"]))
    monkeypatch.setattr(Caller, "stream", stream)
    node = Node(lambda _: True, lambda: True, lambda: b"")
    settings = ApiSettings(voices=VoiceSettings(store=str(tmp_path / "voices")))
    api = one_api(FakeSynthesizer(script=utterance()), settings, node=node)
    seen = set()
    for route in every_route(api.routes):
        path, methods = getattr(route, "path", ""), getattr(route, "methods", None) or set()
        for method in {"GET", "HEAD"} & methods:
            counted.clear()
            filled = re.sub(r"\{(\w+)(:\w+)?\}", "7", path)
            await ask(api, method, filled)
            path = re.sub(r":\w+", "", path)
            is_stream = path in STREAMS
            assert counted == (
                {} if path in FREE else {"requests": 1, "streams": 1} if is_stream else {"requests": 1}
            ), path
            seen.add(path)
    assert seen >= set(filter(is_here, STREAMS))


def scope(*forwarded: str) -> Scope:
    headers = [(b"x-forwarded-for", line.encode()) for line in forwarded]
    return {"type": "http", "client": ("127.0.0.1", 7), "headers": headers}


@pytest.mark.parametrize(
    ("trusted", "forwarded", "address"),
    [
        (0, (), "127.0.0.1"), (0, ("6.6.6.6",), "127.0.0.1"), (1, ("6.6.6.6, 10.0.0.1",), "10.0.0.1"),
        (2, ("6.6.6.6, 10.0.0.1", "10.0.0.2"), "10.0.0.1"), (2, ("10.0.0.2",), "127.0.0.1"), (1, (), "127.0.0.1"),
    ],
)  # fmt: skip
def test_only_what_trusted_proxies_added_is_believed(trusted: int, forwarded: tuple[str, ...], address: str) -> None:
    assert access_control.client_address(scope(*forwarded), trusted_proxies=trusted) == address


def test_a_client_without_an_address_has_a_name() -> None:
    assert access_control.client_address({"type": "http", "headers": []}, trusted_proxies=0) == "unknown"


def test_a_close_reason_fits_into_a_frame() -> None:
    assert len(close_reason(Overloaded("é" * 500, 29.5)).encode()) <= 123
    assert close_reason(Overloaded("full; é", 29.5)) == "overloaded, retry after 30 s: full"
