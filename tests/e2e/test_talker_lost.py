"""Last of all, since it takes the talker down."""

import asyncio
import os
import signal

import aiohttp
import pytest

from tests.e2e.processes import marked
from tests.e2e.speech import PATH, Pools, body, endless

pytestmark = pytest.mark.anyio

ENGINE = "deployments.talker.engine_process"


async def test_a_dead_engine_is_replaced(http: aiohttp.ClientSession, pools: Pools, run_id: str) -> None:
    async with http.post(PATH, json=endless()) as answer:
        assert await answer.content.readany()
        [engine] = [process for process, command in marked(run_id).items() if ENGINE in command]
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    async with asyncio.timeout(60):
        while (status := await _status_of_speech(http)) != 200:
            assert status == 503
            await asyncio.sleep(0.1)
    [successor] = [process for process, command in marked(run_id).items() if ENGINE in command]
    assert successor != engine


async def _status_of_speech(http: aiohttp.ClientSession) -> int:
    async with http.post(PATH, json=body(max_new_tokens=5)) as answer:
        await answer.read()
        return answer.status
