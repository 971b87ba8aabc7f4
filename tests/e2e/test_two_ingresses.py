"""Requests that write and hear one text, each to the HTTP port of another ingress replica, and through the proxy.

And requests of which a replica that ends has answered nothing.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import cycle

import aiohttp
import pytest

from serve_app.ray_settings import free_port
from tests.e2e.black_box import users_environment
from tests.e2e.processes import MARK, marked
from tests.e2e.sockets import listeners, unread
from tests.e2e.test_command_line import BOUND_S, read_until

pytestmark = pytest.mark.anyio

SERVER = """
import sys
from serve_app.config import AppConfig, PoolConfig
from serve_app.local_server import Address, running
ingress = PoolConfig(replicas=2, num_cpus=0.1, max_queued_requests=256)
with running(AppConfig(model="embedded", ingress_pool=ingress), Address("127.0.0.1", int(sys.argv[1])), print):
    print("serving", flush=True)
    sys.stdin.read()
"""
HTTP_PORTS = range(30_000, 32_768)  # of Serve's replicas; Ray's own are above
PATH = "/generate/stream"
WORDS = ["Good", "morning,", "how", "can", "I", "help", "you", "today?"]
SECOND = 2 * 24000
SHORT = json.dumps({"input": "Hello.", "voice": "alloy", "response_format": "pcm", "max_new_tokens": 8}).encode()


@dataclass(frozen=True, slots=True)
class Service:
    """A running server, and the URL of its proxy."""

    proxy: str
    mark: str

    def ingresses(self) -> list[int]:
        """Processes of its ingress replicas."""
        return [process for process, command in marked(self.mark).items() if "ServeReplica:talkray:Ingress" in command]

    def replicas(self) -> list[str]:
        """URLs of its ingress replicas."""
        return [f"http://127.0.0.1:{port}" for port in http_ports(self.ingresses())]


def http_ports(replicas: list[int]) -> list[int]:
    """On which Serve's ingress replicas hear HAProxy."""
    return [listener.port for listener in listeners(replicas) if listener.port in HTTP_PORTS]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    port, mark = free_port(), uuid.uuid4().hex
    command, environment = [sys.executable, "-c", SERVER, str(port)], users_environment() | {MARK: mark}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        read_until(process.stdout, "serving")
        yield Service(f"http://127.0.0.1:{port}", mark)
        process.communicate(timeout=BOUND_S)
    assert marked(mark) == {}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A new connection for each request: the proxy may choose another replica."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def heard(http: aiohttp.ClientSession, keeper: str, hearer: str, writers: list[str]) -> bytes:
    """The audio of `WORDS`, which are written once the answer to whoever hears them has begun."""
    async with http.post(f"{keeper}{PATH}/start", data={"speaker": "nora"}) as answer:
        request_id = (await answer.json())["request_id"]
    async with http.get(f"{hearer}{PATH}/{request_id}/audio") as audio:
        assert (audio.status, audio.content_type) == (200, "audio/wav")
        for word, writer in zip(WORDS, cycle(writers), strict=False):
            async with http.post(f"{writer}{PATH}/{request_id}/text", data={"text": f"{word} "}) as answer:
                assert answer.status == 200, await answer.text()
        async with http.get(f"{writers[0]}{PATH}/{request_id}/audio") as again:
            assert again.status == 409
        async with http.post(f"{writers[-1]}{PATH}/{request_id}/end") as answer:
            assert (await answer.json())["status"] == "completed"
        return await audio.content.read()


async def test_any_replica_writes_and_hears(service: Service, http: aiohttp.ClientSession) -> None:
    [one, other] = service.replicas()
    for keeper, hearer, writers in ((one, other, [one, other]), (other, one, [one]), (one, one, [other])):
        wav = await heard(http, keeper, hearer, writers)
        assert wav.startswith(b"RIFF")
        assert SECOND < len(wav) < 10 * SECOND


async def test_through_the_proxy(service: Service, http: aiohttp.ClientSession) -> None:
    proxy = service.proxy
    wavs = await asyncio.gather(*(heard(http, proxy, proxy, [proxy]) for _ in range(3)))
    assert all(SECOND < len(wav) < 10 * SECOND for wav in wavs)


def ask(connection: HTTPConnection, *, in_parts: bool) -> None:
    """For a short utterance. `in_parts`: with its body behind the head, as many clients send it."""
    connection.putrequest("POST", "/v1/audio/speech")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(len(SHORT)))
    if in_parts:
        connection.endheaders()
        time.sleep(0.05)
        connection.send(SHORT)
    else:
        connection.endheaders(SHORT)


def status(connection: HTTPConnection) -> int:
    """Of the answer, of which nothing is left to be read."""
    with connection.getresponse() as answer:
        answer.read()
        return answer.status


def test_what_a_replica_has_not_answered_another_one_answers(service: Service) -> None:
    with ExitStack() as opened:
        connections = [
            opened.enter_context(closing(HTTPConnection(service.proxy.removeprefix("http://"), timeout=60)))
            for _ in range(8)
        ]
        for connection in connections:
            ask(connection, in_parts=False)
        assert [status(connection) for connection in connections] == 8 * [200]
        victim = service.ingresses()[0]
        [port] = http_ports([victim])
        os.kill(victim, signal.SIGSTOP)
        for number, connection in enumerate(connections):
            ask(connection, in_parts=number % 4 > 1)
        answered, bound_s = 0, time.monotonic() + BOUND_S
        while answered + unread(port) < 8:
            assert time.monotonic() < bound_s, f"{answered} answered, {unread(port)} at the replica that stands still"
            answered = len(select.select([connection.sock for connection in connections], [], [], 0.1)[0])
        assert 0 < answered < 8
        os.kill(victim, signal.SIGKILL)
        assert [status(connection) for connection in connections] == 8 * [200]
