"""Limits for one client address, and which address that is."""

import asyncio

import pytest
from starlette.types import Scope

from deployments.errors import Overloaded
from serve_app.api import create_api
from serve_app.api_settings import AdmissionSettings, ApiSettings
from serve_app.client_limits import Bucket, client_address, close_reason
from tests.serve_app.asgi import Connection, http, websocket
from tests.serve_app.fake import FakeSynthesizer, utterance

pytestmark = pytest.mark.anyio

BODY = {"model": "qwen3-tts", "input": "Hello.", "voice": "alloy", "response_format": "pcm"}
PATH = "/v1/audio/speech"
SOCKET = "/v1/audio/speech/ws"


class Server:
    """The API with limits, behind one trusted proxy; streams wait until they are let go."""

    def __init__(self, **limits: int) -> None:
        self.gate = asyncio.Event()
        self.synthesizer = FakeSynthesizer(script=[self.gate, *utterance(1)])
        self.api = create_api(self.synthesizer, ApiSettings(admission=AdmissionSettings(trusted_proxies=1, **limits)))

    def ask(self, address: str) -> Connection:
        return http(self.api, "POST", PATH, body=BODY, headers={"x-forwarded-for": address})

    async def status(self, address: str) -> int:
        async with self.ask(address) as connection:
            status: int = (await connection.next())["status"]
            return status


async def test_one_address_has_so_many_streams_and_another_its_own() -> None:
    server = Server(client_streams=1)
    async with server.ask("10.0.0.1") as connection:
        await server.synthesizer.waiting.wait()
        assert await server.status("10.0.0.1") == 429
        server.gate.set()
        assert await server.status("10.0.0.2") == 200
        assert (await connection.next())["status"] == 200
    assert await server.status("10.0.0.1") == 200


async def test_a_refusal_says_when_to_come_back() -> None:
    server = Server(client_requests_per_minute=1)
    server.gate.set()
    assert await server.status("10.0.0.1") == 200
    async with server.ask("10.0.0.1") as connection:
        start = await connection.next()
        assert start["status"] == 429
        assert 55 <= int(dict(start["headers"])[b"retry-after"]) <= 60
    assert await server.status("10.0.0.2") == 200


async def test_a_full_server_does_not_parse_what_it_refuses() -> None:
    server = Server(max_streams=1)
    async with server.ask("10.0.0.1") as connection:
        await server.synthesizer.waiting.wait()
        async with http(server.api, "POST", PATH, body=["no object"]) as refused:
            assert (await refused.next())["status"] == 429
        server.gate.set()
        assert (await connection.next())["status"] == 200
    async with http(server.api, "POST", PATH, body=["no object"]) as wrong:
        assert (await wrong.next())["status"] == 400


async def test_asking_for_anything_but_speech_costs_nothing() -> None:
    server = Server(client_requests_per_minute=1)
    for _ in range(3):
        async with http(server.api, "GET", "/health") as connection:
            assert (await connection.next())["status"] == 200


async def test_an_open_socket_is_a_stream_and_one_too_many_is_closed_with_a_reason() -> None:
    server = Server(client_streams=1)
    address = {"x-forwarded-for": "10.0.0.1"}
    async with websocket(server.api, SOCKET, headers=address) as first:
        assert (await first.next())["type"] == "websocket.accept"
        async with websocket(server.api, SOCKET, headers=address) as second:
            assert (await second.next())["type"] == "websocket.accept"
            closed = await second.next()
            assert (closed["type"], closed["code"]) == ("websocket.close", 1013)
            assert "retry after" in closed["reason"]


def test_tokens_come_back_steadily_and_not_beyond_a_minute() -> None:
    bucket = Bucket(120, now_s=0.0)
    assert [bucket.take(0.0) for _ in range(120)] == [0.0] * 120
    assert bucket.take(0.0) == pytest.approx(0.5)
    assert bucket.take(0.5) == 0.0
    assert bucket.take(10_000.0) == 0.0
    assert [bucket.take(10_000.0) for _ in range(120)].count(0.0) == 119


def scope(*forwarded: str) -> Scope:
    headers = [(b"x-forwarded-for", line.encode()) for line in forwarded]
    return {"type": "http", "client": ("127.0.0.1", 7), "headers": headers}


@pytest.mark.parametrize(
    ("trusted", "forwarded", "address"),
    [
        (0, (), "127.0.0.1"),
        (0, ("6.6.6.6",), "127.0.0.1"),
        (1, ("6.6.6.6, 10.0.0.1",), "10.0.0.1"),
        (2, ("6.6.6.6, 10.0.0.1", "10.0.0.2"), "10.0.0.1"),
        (2, ("10.0.0.2",), "127.0.0.1"),
        (1, (), "127.0.0.1"),
    ],
)
def test_only_what_trusted_proxies_added_is_believed(trusted: int, forwarded: tuple[str, ...], address: str) -> None:
    assert client_address(scope(*forwarded), trusted_proxies=trusted) == address


def test_a_client_without_an_address_has_a_name() -> None:
    assert client_address({"type": "http", "headers": []}, trusted_proxies=0) == "unknown"


def test_a_close_reason_fits_into_a_frame() -> None:
    assert len(close_reason(Overloaded("x" * 500, 29.5)).encode()) <= 123
    assert close_reason(Overloaded("full", 29.5)) == "overloaded, retry after 30 s"
