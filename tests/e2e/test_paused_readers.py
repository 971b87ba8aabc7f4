"""Clients that take nothing for a while hold nothing of the pools meanwhile, and hear the same when they read on."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest

from tests.e2e.speech import PATH, Pools, body

pytestmark = pytest.mark.anyio

NUM_BYTES = 8 << 20  # more than lies in buffers while a client reads nothing
# Minutes, which a talker does not finish beforehand, at four bytes for each of 48,000 samples a second.
REQUEST = body(seed=7, ignore_eos=True, max_new_tokens=3000, response_format="pcm_f32le", sample_rate=48000)
LSB = 1 / 32768
PATIENCE_S = 90.0  # until buffers are full on a busy machine, and then ten seconds


@pytest.fixture(scope="module")
async def undisturbed(http: aiohttp.ClientSession) -> bytes:
    """What is heard of it by a client that reads all the time."""
    async with http.post(PATH, json=REQUEST) as answer:
        return await answer.content.readexactly(NUM_BYTES)


@pytest.fixture(autouse=True)
async def idle(pools: Pools) -> AsyncIterator[None]:
    await pools.reach(running=0)
    yield
    await pools.reach(running=0)


async def test_over_http(http: aiohttp.ClientSession, pools: Pools, undisturbed: bytes) -> None:
    async with http.post(PATH, json=REQUEST) as answer:
        before = await answer.content.readexactly(4)
        await pools.reach(running=1)
        await pools.reach(running=0, within_s=PATIENCE_S)
        reading = asyncio.create_task(answer.content.readexactly(NUM_BYTES - len(before)))
        await pools.reach(running=1)  # the stream was not over: it goes on
        after = await reading
    assert is_same(before + after, undisturbed)


async def test_over_a_websocket(http: aiohttp.ClientSession, pools: Pools, undisturbed: bytes) -> None:
    async with http.ws_connect(f"{PATH}/ws") as socket:
        await socket.send_json({"type": "speak", **REQUEST})
        assert (await socket.receive_json())["type"] == "started"
        await pools.reach(running=1)
        await pools.reach(running=0, within_s=PATIENCE_S)
        reading = asyncio.create_task(read(socket))
        await pools.reach(running=1)
        heard = await reading
    assert is_same(heard, undisturbed)


async def read(socket: aiohttp.ClientWebSocketResponse) -> bytes:
    heard = bytearray()
    while len(heard) < NUM_BYTES:
        heard += await socket.receive_bytes()
    return bytes(heard[:NUM_BYTES])


def is_same(one: bytes, other: bytes) -> bool:
    difference = np.frombuffer(one, "<f4") - np.frombuffer(other, "<f4")
    return float(np.abs(difference).max()) <= 2 * LSB
