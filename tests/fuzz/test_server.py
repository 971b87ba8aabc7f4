"""The same against a running server: real proxy, real engine, and nothing left over afterwards."""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import aiohttp
import pytest
import torch

from deployments.config import TalkerConfig
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.state.kv_cache import KVCache
from serve_app.config import AdmissionSettings, ApiSettings, AppConfig
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from tests.e2e.speech import PATH, Pools, endless, fetch
from tests.fuzz.conftest import BOUND_S, NUM_CASES, SEED, Cases
from tests.fuzz.texts import body, text
from tools.suites.application import running

pytestmark = [pytest.mark.anyio, pytest.mark.fuzz]

AT_ONCE, FEW_FRAMES = 8, 3
# Short, so that a case takes milliseconds; long texts do not fit, which they have to be told before a byte is sent.
MAX_MODEL_LEN = 256
BLOCK = 16  # positions of a KV block on a CPU
PATIENT = AdmissionSettings(max_line_s=1000, max_late_s=1000, max_wait_s=1000)  # overload has tests of its own


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a whole application, or the one in `TALKRAY_FUZZ_URL`, which several fuzzers may share.

    Its KV cache holds one utterance of the greatest length and not a block more: a block that leaks is missed.
    """
    if (shared := os.environ.get("TALKRAY_FUZZ_URL")) is not None:
        yield shared
        return
    model = tmp_path_factory.mktemp("fuzz") / "tiny"
    write_checkpoint(model, SHAPES["tiny-CustomVoice"], Options(dtype=torch.float32))
    block = BLOCK * KVCache.bytes_per_position(ModelConfig.load(model).talker, torch.float32)
    talker = TalkerConfig(
        max_num_seqs=AT_ONCE, max_num_waiting=2 * AT_ONCE, max_model_len=MAX_MODEL_LEN,
        kv_cache_bytes=block * (MAX_MODEL_LEN // BLOCK + 1),  # one block is reserved for padded rows
    )  # fmt: skip
    with running(AppConfig(model=str(model), talker=talker, api=ApiSettings(admission=PATIENT))) as url:
        yield url


@pytest.fixture(scope="session")
async def http(server: str) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=BOUND_S)
    async with aiohttp.ClientSession(server, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield session


@pytest.fixture
async def pools(http: aiohttp.ClientSession) -> AsyncIterator[Pools]:
    """Whatever was sent: nothing runs any more, and one utterance gets every KV block."""
    pools = Pools()
    longest = len(await fetch(http, endless(seed=0)))
    yield pools
    await pools.reach(running=0)
    assert len(await fetch(http, endless(seed=0))) == longest
    await pools.reach(running=0)


def chances(name: str) -> Iterator[random.Random]:
    return (random.Random(f"{SEED}.{name}.{number}") for number in range(NUM_CASES))


async def test_texts(http: aiohttp.ClientSession, pools: Pools, cases: Cases) -> None:
    fields = {"voice": "alloy", "response_format": "pcm", "max_new_tokens": FEW_FRAMES}
    waiting = asyncio.Semaphore(AT_ONCE)

    async def ask(chance: random.Random) -> None:
        content = text(chance)[: chance.choice((40, 200, 5000))]
        async with waiting, http.post(PATH, data=body(chance, fields, content)) as answer:
            if chance.random() < 0.2:
                cases.count("left")
                return  # in the middle of it
            reply = await answer.read()
            cases.count(answer.status)
            assert answer.status < 500, reply
            assert answer.status == 200 or json.loads(reply)["error"]["message"]

    async with asyncio.TaskGroup() as asking:  # the first failure ends all: no test may run beside the next one
        for chance in chances("texts"):
            asking.create_task(ask(chance))


async def test_sockets(http: aiohttp.ClientSession, pools: Pools, cases: Cases) -> None:
    waiting = asyncio.Semaphore(AT_ONCE)

    async def talk(chance: random.Random) -> None:
        async with waiting, http.ws_connect(f"{PATH}/ws") as socket:
            for _ in range(chance.randint(1, 8)):
                await _send_something(socket, chance)
            cases.count("sequence")
            if chance.random() < 0.5:
                return
            await socket.send_json({"type": "cancel"})
            async with asyncio.timeout(BOUND_S):
                while (message := await socket.receive()).type is not aiohttp.WSMsgType.CLOSED:
                    assert message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT), message
                    if message.type is aiohttp.WSMsgType.TEXT:
                        event = message.json()
                        assert event.get("error", {}).get("type") != "server_error", event
                        if event["type"] == "cancelled":
                            return

    async with asyncio.TaskGroup() as talking:
        for chance in chances("sockets"):
            talking.create_task(talk(chance))


async def _send_something(socket: aiohttp.ClientWebSocketResponse, chance: random.Random) -> None:
    match chance.randrange(6):
        case 0 | 1:
            await socket.send_json({"type": "speak", **endless(), "input": "Go on."})
        case 2:
            await socket.send_json({"type": "cancel"})
        case 3:
            await socket.send_str(text(chance)[:2000].encode("utf-8", "replace").decode())
        case 4:
            await socket.send_bytes(chance.randbytes(chance.randint(0, 200)))
        case 5:
            await socket.send_json(
                {"type": "speak", "input": text(chance)[:500], "max_new_tokens": FEW_FRAMES, "voice": "alloy"}
            )


async def test_bytes_that_are_no_http(server: str, pools: Pools, cases: Cases) -> None:
    """The proxy answers with a client's error or hangs up; the server stays."""
    address = urlsplit(server)
    good = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}"
    for chance in chances("bytes"):
        data = bytearray(good.encode())
        for _ in range(chance.randint(1, 5)):
            place = chance.randrange(len(data))
            data[place : place + chance.randint(0, 4)] = chance.randbytes(chance.randint(0, 6))
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(bytes(data))
        writer.write_eof()
        async with asyncio.timeout(BOUND_S):
            first = await reader.read(12)
        cases.count(first.decode("latin-1")[9:12] or "closed")
        assert first[9:10] != b"5", (data, first)
        writer.close()
