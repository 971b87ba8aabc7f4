"""Whoever leaves frees the talker behind them, from whichever place in the line."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.e2e.conftest import TALKER
from tests.e2e.speech import PATH, Pools, body, endless, fetch

pytestmark = pytest.mark.anyio

ALL_RUNNING = TALKER.max_num_seqs


@pytest.fixture(autouse=True)
async def idle(http: aiohttp.ClientSession, pools: Pools) -> AsyncIterator[None]:
    """The talker is idle before and after, and can still speak."""
    await pools.reach(running=0)
    yield
    await pools.reach(running=0)
    assert await fetch(http, body(max_new_tokens=5))


async def test_http_disconnect(http: aiohttp.ClientSession, pools: Pools) -> None:
    answer = await http.post(PATH, json=endless())
    assert await answer.content.readany()
    assert await pools.load() == (1, 0), "the first bytes came when all was spoken"
    answer.close()
    await pools.reach(running=0)


async def test_http_disconnect_before_the_answer_begins(http: aiohttp.ClientSession, pools: Pools) -> None:
    asking = asyncio.create_task(fetch(http, endless(stream=False)))
    await pools.reach(running=1)
    asking.cancel()
    await pools.reach(running=0)


async def test_http_disconnect_while_queued(http: aiohttp.ClientSession, pools: Pools) -> None:
    running = [asyncio.create_task(fetch(http, endless())) for _ in range(ALL_RUNNING)]
    await pools.reach(running=ALL_RUNNING)
    queued = asyncio.create_task(fetch(http, endless()))
    await pools.reach(running=ALL_RUNNING, waiting=1)
    queued.cancel()
    await pools.reach(running=ALL_RUNNING)
    for task in running:
        task.cancel()
    await pools.reach(running=0)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_websocket_is_closed_or_lost(server: str, pools: Pools, is_lost: bool) -> None:
    async with aiohttp.ClientSession(server) as session:
        socket = await session.ws_connect(f"{PATH}/ws")
        await _speak(socket)
        await pools.reach(running=1)
        if is_lost:
            socket.get_extra_info("socket").shutdown(2)
        else:
            await socket.close()
        await pools.reach(running=0)


async def test_websocket_cancel(http: aiohttp.ClientSession, pools: Pools) -> None:
    async with http.ws_connect(f"{PATH}/ws") as socket:
        await _speak(socket)
        await pools.reach(running=1)
        await socket.send_json({"type": "cancel"})
        await pools.reach(running=0)
        while (message := await socket.receive()).type is aiohttp.WSMsgType.BINARY:
            pass
        assert message.json()["type"] == "cancelled"
        assert message.json()["frames"] > 0


async def _speak(socket: aiohttp.ClientWebSocketResponse) -> None:
    await socket.send_json({"type": "speak", **endless()})
    assert (await socket.receive_json())["type"] == "started"
    assert await socket.receive_bytes()
