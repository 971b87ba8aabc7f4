"""Last of all, since it takes the talker down."""

import asyncio
import os
import signal

import aiohttp
import pytest

from tests.e2e.processes import marked
from tests.e2e.speech import PATH, body, fetch
from tools.experiments.faults.polite import difference

pytestmark = pytest.mark.anyio

ENGINE = "deployments.talker.process"
UTTERANCE = body(ignore_eos=True, max_new_tokens=250, seed=7)


async def test_a_stream_outlives_its_engine(http: aiohttp.ClientSession, run_id: str) -> None:
    """The only talker dies: the stream waits for the next one and goes on there, and then the server is ready again."""
    whole = await fetch(http, UTTERANCE)
    async with http.post(PATH, json=UTTERANCE) as answer:
        begun = await answer.content.readany()
        [engine] = [process for process, command in marked(run_id).items() if ENGINE in command]
        os.kill(engine, signal.SIGKILL)
        assert difference(begun + await answer.read(), whole) is None
    [successor] = [process for process, command in marked(run_id).items() if ENGINE in command]
    assert successor != engine
    async with asyncio.timeout(60):
        while not await is_ready(http):  # noqa: ASYNC110, another process changes it
            await asyncio.sleep(0.5)


async def is_ready(http: aiohttp.ClientSession) -> bool:
    async with http.get("/ready") as answer:
        return answer.status == 200
