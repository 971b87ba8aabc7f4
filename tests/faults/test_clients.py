"""What a client sees of an ingress that dies, and how it goes on."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress

import aiohttp
import pytest

from tests.e2e.speech import PATH, body, endless, fetch
from tools.experiments.faults.polite import difference
from tools.suites.pools import Service

pytestmark = pytest.mark.anyio

SEED = 5
INGRESS = "Ingress"


@pytest.fixture
async def http(service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(service.url, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


def utterance(**fields: object) -> dict[str, object]:
    return body(max_new_tokens=200, ignore_eos=True, seed=SEED, leading_silence=True, **fields)


async def answers(http: aiohttp.ClientSession) -> None:
    """Wait until the service takes requests again."""
    async with asyncio.timeout(60):
        while True:
            with suppress(aiohttp.ClientError):
                async with http.get("/ready") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)


async def dead_ingresses(http: aiohttp.ClientSession) -> int:
    """How many the metrics know of."""
    async with http.get("/metrics") as answer:
        counts = re.findall(r'^ray_talkray_replicas_died{.*pool="ingress".*} (\S+)', await answer.text(), re.MULTILINE)
    return max((int(float(count)) for count in counts), default=0)


async def test_a_dead_ingress_never_ends_a_body_cleanly(http: aiohttp.ClientSession, service: Service) -> None:
    async with http.post(PATH, json=endless()) as answer:
        assert await answer.content.readany()
        service.kill(service.processes(INGRESS)[0])
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    await answers(http)
    async with asyncio.timeout(60):
        while not await dead_ingresses(http):  # noqa: ASYNC110, another process counts
            await asyncio.sleep(1)


async def test_a_websocket_client_goes_on_after_it(http: aiohttp.ClientSession, service: Service) -> None:
    expected = await fetch(http, utterance())
    pcm = b""
    async with http.ws_connect(f"{PATH}/ws") as socket:
        await socket.send_json({"type": "speak", **utterance()})
        started = await socket.receive_json()
        while len(pcm) < 2 * 1920 * 10:
            pcm += await socket.receive_bytes()
        service.kill(service.processes(INGRESS)[0])
        while (message := await socket.receive()).type is aiohttp.WSMsgType.BINARY:
            pcm += message.data
        assert message.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.ERROR)
    await answers(http)
    had = len(pcm) // (2 * 1920)
    again = {"request_id": started["request_id"], "seed": started["seed"], "from_frame": had}
    rest = b""
    async with http.ws_connect(f"{PATH}/ws") as socket:
        await socket.send_json({"type": "speak", **utterance(), **again})
        assert (await socket.receive_json())["request_id"] == started["request_id"]
        while (message := await socket.receive()).type is aiohttp.WSMsgType.BINARY:
            rest += message.data
        assert message.json()["type"] == "done"
    assert difference(pcm[: had * 2 * 1920] + rest, expected) is None
