"""Requests that write and hear one text, each to the HTTP port of another ingress replica, and through the proxy."""

import asyncio
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import cycle

import aiohttp
import pytest

from serve_app.ray_settings import free_port
from tests.e2e.black_box import users_environment
from tests.e2e.processes import MARK, marked
from tests.e2e.sockets import listeners
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


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, list[str]]]:
    """The proxy's, and those of its ingress replicas."""
    port, mark = free_port(), uuid.uuid4().hex
    command, environment = [sys.executable, "-c", SERVER, str(port)], users_environment() | {MARK: mark}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        read_until(process.stdout, "serving")
        replicas = [pid for pid, command in marked(mark).items() if "ServeReplica:talkray:Ingress" in command]
        ports = [listener.port for listener in listeners(replicas) if listener.port in HTTP_PORTS]
        yield f"http://127.0.0.1:{port}", [f"http://127.0.0.1:{port}" for port in ports]
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


async def test_any_replica_writes_and_hears(urls: tuple[str, list[str]], http: aiohttp.ClientSession) -> None:
    [one, other] = urls[1]
    for keeper, hearer, writers in ((one, other, [one, other]), (other, one, [one]), (one, one, [other])):
        wav = await heard(http, keeper, hearer, writers)
        assert wav.startswith(b"RIFF")
        assert SECOND < len(wav) < 10 * SECOND


async def test_through_the_proxy(urls: tuple[str, list[str]], http: aiohttp.ClientSession) -> None:
    proxy = urls[0]
    wavs = await asyncio.gather(*(heard(http, proxy, proxy, [proxy]) for _ in range(3)))
    assert all(SECOND < len(wav) < 10 * SECOND for wav in wavs)
