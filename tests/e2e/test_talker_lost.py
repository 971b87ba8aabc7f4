"""Last of all, since it takes the talker down."""

import asyncio
import os
import signal

import aiohttp
import pytest

from talkray_tools.logs import lines_here, matching
from tests.e2e.speech import PATH, body, fetch
from tools.experiments.faults.polite import difference
from tools.suites.processes import marked

pytestmark = pytest.mark.anyio

ENGINE = "deployments.talker.process.engine_process"
UTTERANCE = body(ignore_eos=True, max_new_tokens=250, seed=7)


async def test_a_stream_outlives_its_engine(http: aiohttp.ClientSession, run_id: str) -> None:
    """The only talker dies: the stream waits for the next one and goes on there, and then the server is ready again.

    The stream goes on from an earlier request, from whose tail the next talker begins too. The request's line tells
    the story.
    """
    async with http.post(PATH, json=body("It was dark already.", seed=5)) as answer:
        await answer.read()
        joined = UTTERANCE | {"previous_request_id": answer.headers["x-request-id"]}
    whole = await fetch(http, joined)
    assert difference(await fetch(http, UTTERANCE), whole) is not None, "the tail has no effect"
    async with http.post(PATH, json=joined) as answer:
        assert "x-ignored" not in answer.headers
        begun = await answer.content.readany()
        [engine] = [process for process, command in marked(run_id).items() if ENGINE in command]
        os.kill(engine, signal.SIGKILL)
        assert difference(begun + await answer.read(), whole) is None
        request_id = answer.headers["x-request-id"]
    [successor] = [process for process, command in marked(run_id).items() if ENGINE in command]
    assert successor != engine
    async with asyncio.timeout(60):
        while not await is_ready(http):  # noqa: ASYNC110, another process changes it
            await asyncio.sleep(0.5)
    async with asyncio.timeout(10):  # a thread of the ingress writes it, some moments after the answer
        while not (found := list(matching(request_id, lines_here()))):  # noqa: ASYNC110, a file
            await asyncio.sleep(0.05)
    [entry] = found
    first, codec, loss, second = entry["replicas"]
    assert [name.partition("#")[0] for name in (first, codec, loss, second)] == [
        "Talker", "Codec", "TalkerLost", "Talker",
    ]  # fmt: skip
    assert first != second
    assert entry["outcome"] == "length"


async def is_ready(http: aiohttp.ClientSession) -> bool:
    async with http.get("/ready") as answer:
        return answer.status == 200
