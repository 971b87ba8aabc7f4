"""Clients that take nothing for a while hold nothing of the pools meanwhile, and are spoken to when they read on.

The kernel's buffers between an ingress replica, HAProxy and a client take up to 7 MB before anybody notices.
"""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest

from tests.e2e.speech import PATH, Pools, body

# A minute and a half: tests/serve_app/api/test_paused_readers.py has it with small buffers.
pytestmark = [pytest.mark.anyio, pytest.mark.faults]

NUM_BYTES = 9 << 20  # more than lies in buffers
ENDLESS = body(seed=7, ignore_eos=True, max_new_tokens=3000, sample_rate=48000)
FLOATS = ENDLESS | {"response_format": "pcm_f32le"}
LSB = 1 / 32768
PATIENCE_S = 90.0  # until the buffers are full on a busy machine, and then ten seconds


@pytest.fixture(autouse=True)
async def idle(pools: Pools) -> AsyncIterator[None]:
    await pools.reach(running=0)
    yield
    await pools.reach(running=0)


async def test_over_http(http: aiohttp.ClientSession, pools: Pools) -> None:
    async with http.post(PATH, json=FLOATS) as answer:
        before = await answer.content.readexactly(4)
        await pools.reach(running=1)
        async with http.post(PATH, json=FLOATS) as other:  # while the buffers of the first one fill
            undisturbed = await other.content.readexactly(NUM_BYTES)
        await pools.reach(running=0, within_s=PATIENCE_S)
        reading = asyncio.create_task(answer.content.readexactly(NUM_BYTES - len(before)))
        await pools.reach(running=1)  # the stream was not over: it goes on
        after = await reading
    difference = np.frombuffer(before + after, "<f4") - np.frombuffer(undisturbed, "<f4")
    assert float(np.abs(difference).max()) <= 2 * LSB


async def test_over_a_websocket(http: aiohttp.ClientSession, pools: Pools) -> None:
    async with http.ws_connect(f"{PATH}/ws") as socket:
        await socket.send_json({"type": "speak", **ENDLESS, "speed": 0.25})
        assert (await socket.receive_json())["type"] == "started"
        await pools.reach(running=1)
        await pools.reach(running=0, within_s=PATIENCE_S)
        reading = asyncio.create_task(read(socket))
        await pools.reach(running=1)
        await reading


async def read(socket: aiohttp.ClientWebSocketResponse) -> None:
    num_bytes = 0
    while num_bytes < NUM_BYTES:
        num_bytes += len(await socket.receive_bytes())
