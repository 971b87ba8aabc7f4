import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from serve_app.access import EXEMPT
from serve_app.api import create_api
from serve_app.api_settings import AccessSettings, ApiSettings
from serve_app.auth import create_key, revoke_keys
from tests.serve_app import asgi
from tests.serve_app.fake import FakeSynthesizer, utterance
from tests.serve_app.test_websocket import SPEAK, accepted, code_of

pytestmark = pytest.mark.anyio

SPEECH = "/v1/audio/speech"
BODY = {"model": "tts-1", "input": "Hello", "voice": "alloy", "response_format": "pcm"}
DENIAL = {"websocket.http.response": {}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def key(file: Path) -> str:
    return create_key(file, "ada")


def surface(synthesizer: FakeSynthesizer | None = None, **access: object) -> FastAPI:
    settings = ApiSettings(access=AccessSettings.model_validate(access))
    return create_api(synthesizer or FakeSynthesizer(script=utterance()), settings)


def client_of(api: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://talkray")


async def ask(api: FastAPI, method: str = "POST", path: str = SPEECH, **headers: str) -> httpx.Response:
    async with client_of(api) as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await client.request(method, path, json=BODY if method == "POST" else None, headers=named)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Authorization", "Bearer {}"),
        ("Authorization", "bearer  {}"),
        ("Authorization", "Token {}"),
        ("xi-api-key", "{}"),
        ("X-API-Key", "{}"),
    ],
)
async def test_every_way_to_send_a_key(file: Path, key: str, header: str, value: str) -> None:
    api = surface(keys_file=file)
    assert (await ask(api, **{header: value.format(key)})).status_code == 200
    assert (await ask(api, **{header: value.format(key[:-1])})).status_code == 401


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Basic YTpi"}, {"Authorization": "Bearer"}, {"xi-api-key": ""}]
)
async def test_a_request_without_a_valid_key(file: Path, key: str, headers: dict[str, str]) -> None:
    synthesizer = FakeSynthesizer(script=utterance())
    answer = await ask(surface(synthesizer, keys_file=file), **headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert answer.headers["x-request-id"]
    assert synthesizer.requests == []


async def test_a_key_in_the_query_of_a_request_is_none(file: Path, key: str) -> None:
    assert (await ask(surface(keys_file=file), path=f"{SPEECH}?api_key={key}")).status_code == 401


@pytest.mark.parametrize("path", sorted(EXEMPT))
async def test_probes_and_lists_need_no_key(file: Path, key: str, path: str) -> None:
    assert (await ask(surface(keys_file=file), "GET", path)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1", "/openapi.json", "/v1/nothing", "/health/", "//health"])
async def test_everything_else_does(file: Path, key: str, path: str) -> None:
    assert (await ask(surface(keys_file=file), "GET", path)).status_code == 401


async def test_without_a_key_file_nobody_is_asked() -> None:
    assert (await ask(surface(), Authorization="Bearer unused")).status_code == 200


async def test_a_key_that_is_revoked_fails_at_once(file: Path, key: str) -> None:
    api = surface(keys_file=file)
    assert (await ask(api, Authorization=f"Bearer {key}")).status_code == 200
    revoke_keys(file, "ada")
    assert (await ask(api, Authorization=f"Bearer {key}")).status_code == 401


async def test_requests_per_minute(file: Path) -> None:
    key, other = create_key(file, "ada", requests_per_minute=2), create_key(file, "bob")
    api = surface(keys_file=file)
    statuses = [(await ask(api, Authorization=f"Bearer {key}")).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    refused = await ask(api, Authorization=f"Bearer {key}")
    assert int(refused.headers["retry-after"]) in range(1, 31)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert (await ask(api, Authorization=f"Bearer {other}")).status_code == 200


async def test_streams_at_once(file: Path) -> None:
    key = create_key(file, "ada", max_streams=1)
    more = asyncio.Event()
    synthesizer = FakeSynthesizer(script=[*utterance()[:1], more, *utterance()])
    api = surface(synthesizer, keys_file=file)
    headers = {"Authorization": f"Bearer {key}"}
    async with asgi.http(api, "POST", SPEECH, body=BODY, headers=headers) as connection:
        assert (await connection.next())["status"] == 200
        assert (await ask(api, Authorization=f"Bearer {key}")).status_code == 429
        assert (await ask(api, "GET", "/v1/models", Authorization=f"Bearer {key}")).status_code == 200
        more.set()
        while (await connection.next()).get("more_body"):
            pass
        await connection.task
    assert (await ask(api, Authorization=f"Bearer {key}")).status_code == 200


async def test_a_stream_that_is_left_counts_no_more(file: Path) -> None:
    key = create_key(file, "ada", max_streams=1)
    synthesizer = FakeSynthesizer(script=[*utterance()[:1], asyncio.Event()])
    api = surface(synthesizer, keys_file=file)
    headers = {"Authorization": f"Bearer {key}"}
    async with asgi.http(api, "POST", SPEECH, body=BODY, headers=headers) as connection:
        assert (await connection.next())["status"] == 200
        connection.receive({"type": "http.disconnect"})
        await connection.task
    synthesizer.script = utterance()
    assert (await ask(api, Authorization=f"Bearer {key}")).status_code == 200


def socket(
    api: FastAPI, *, query: str = "", protocols: tuple[str, ...] = (), denial: bool = True, **headers: str
) -> asgi.Connection:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection = asgi.websocket(api, f"{SPEECH}/ws", headers=named)
    connection._scope["query_string"] = query.encode()
    connection._scope["subprotocols"] = list(protocols)
    connection._scope["extensions"] = DENIAL if denial else {}
    return connection


def _ways(key: str) -> Iterator[tuple[dict[str, object], str | None]]:
    yield {"Authorization": f"Token {key}"}, None
    yield {"query": f"api_key={key}"}, None
    yield {"query": f"model=x&token={key}"}, None
    yield {"protocols": ("token", key)}, "token"
    yield {"protocols": ("realtime", f"openai-insecure-api-key.{key}", "openai-beta.realtime-v1")}, "realtime"
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


async def test_a_websocket_without_a_key(file: Path, key: str) -> None:
    async with socket(surface(keys_file=file)) as connection:
        start, body = await connection.next(), await connection.next()
        assert start["status"] == 401
        assert json.loads(body["body"])["error"]["code"] == "invalid_api_key"
    async with socket(surface(keys_file=file), denial=False) as connection:
        assert await connection.next() == {"type": "websocket.close", "code": 1008, "reason": "invalid_api_key"}


async def test_what_is_asked_over_a_websocket_counts(file: Path) -> None:
    key = create_key(file, "ada", requests_per_minute=3, max_streams=1)
    api = surface(keys_file=file)
    async with socket(api, xi_api_key=key) as connection:
        client = await accepted(connection)
        assert (await ask(api, xi_api_key=key)).status_code == 429  # the socket is the one stream
        for _ in range(2):
            client.send(SPEAK)
            assert (await client.utterance())[1]["type"] == "done"
        client.send(SPEAK)
        assert code_of(await client.event()) == ("rate_limit_exceeded", None)
    async with socket(api, xi_api_key=key) as connection:
        await accepted(connection)


async def test_pages_from_elsewhere() -> None:
    api = surface(allowed_origins=("https://app.example.com",))
    assert (await ask(api, Origin="http://talkray")).status_code == 200
    assert (await ask(api, Origin="https://app.example.com")).status_code == 200
    for origin in ("https://evil.example.com", "null", "http://talkray.evil.com", "http://[", ""):
        answer = await ask(api, Origin=origin)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        async with socket(api, Origin=origin) as connection:
            assert (await connection.next())["status"] == 403


async def test_cors_is_off_unless_told() -> None:
    preflight = {"Origin": "https://app.example.com", "Access-Control-Request-Method": "POST"}
    answer = await ask(surface(), "OPTIONS", **preflight)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


async def test_cors_for_the_pages_on_the_list(file: Path, key: str) -> None:
    api = surface(keys_file=file, allowed_origins=("https://app.example.com",))
    preflight = {
        "Origin": "https://app.example.com",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    allowed = await ask(api, "OPTIONS", **preflight)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example.com"
    assert "access-control-allow-credentials" not in allowed.headers
    refused = await ask(api, Origin="https://app.example.com")  # the page may read why
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://app.example.com")
    assert (await ask(api, "OPTIONS", **preflight | {"Origin": "https://evil.example.com"})).status_code == 400


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("LOCALHOST", 200),
        ("rebound.example.com:8000", 403),
        ("127.0.0.1.example.com", 403),
        ("localhost@evil", 403),
        ("[", 403),
    ],
)
async def test_names_of_the_host(host: str, status: int) -> None:
    api = surface(allowed_hosts=("localhost", "127.0.0.1", "::1"))
    assert (await ask(api, "GET", "/health", Host=host)).status_code == status


async def test_headers_that_are_too_large() -> None:
    answer = await ask(surface(), "GET", "/health", x_filler="x" * (16 << 10))
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")


async def test_no_key_is_logged(file: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    api = surface(FakeSynthesizer(script=[ValueError("broken")]), keys_file=file)
    await ask(api, Authorization=f"Bearer {key}")
    await ask(api, Authorization=f"Bearer {key}x")
    async with socket(api, query=f"token={key}") as connection:
        client = await accepted(connection)
        client.send(SPEAK)
        assert code_of(await client.event()) == ("internal_error", None)
    assert "failed" in caplog.text
    assert key[10:] not in caplog.text
    assert BODY["input"] not in caplog.text
