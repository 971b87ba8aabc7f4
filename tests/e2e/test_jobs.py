"""A job is made once and whole, whatever dies meanwhile."""

import asyncio
import os
import signal
import time

import aiohttp
import pytest

from tests.e2e.speech import PATH
from tools.experiments.faults.polite import difference
from tools.suites.processes import marked

pytestmark = pytest.mark.anyio

JOBS = "/v1/audio/jobs"
ENGINE, REPLICA = "deployments.talker.process.engine_process", "ServeReplica:talkray:Jobs"
TEXTS = [f"This is sentence number {number}." for number in ("one", "two", "three", "four", "five", "six", "seven")]
SPEECH = {"voice": "nora", "seed": 7, "language": "english"}


async def test_a_job_survives_its_talker_and_its_replica(http: aiohttp.ClientSession, run_id: str) -> None:
    async with http.post(
        JOBS, json={**SPEECH, "deterministic": True, "inputs": [{"input": text} for text in TEXTS]}
    ) as answer:
        assert answer.status == 201, await answer.text()
        place = f"{JOBS}/{(await answer.json())['id']}"
    await reach(http, place, 1)
    await kill(run_id, ENGINE)
    done = await reach(http, place, 3)
    await kill(run_id, REPLICA)
    assert await reach(http, place, done) >= done, "what was made is kept"
    await reach(http, place, len(TEXTS))
    async with http.get(place) as answer:
        told = await answer.json()
    assert (told["status"], told["parts"]) == ("completed", {"total": len(TEXTS), "done": len(TEXTS)})
    whole = await fetched(http, f"{place}/audio?response_format=pcm")
    parts = [await fetched(http, f"{place}/parts/{number}?response_format=pcm") for number in range(len(TEXTS))]
    assert b"".join(parts) == whole
    for number in (1, 3):  # as a request of its own has it, though others were lost beside it
        async with http.post(PATH, json={**SPEECH, "input": TEXTS[number], "response_format": "pcm"}) as answer:
            assert difference(parts[number], await answer.read()) is None
    words = await (await http.get(f"{place}/parts/0/words")).json()
    assert [word["word"] for word in words["words"]] == TEXTS[0].split()
    async with http.delete(place) as answer:
        assert answer.status == 200
    async with asyncio.timeout(60):
        while (await http.get("/ready")).status != 200:  # noqa: ASYNC110, another process changes it
            await asyncio.sleep(0.2)


async def kill(run_id: str, title: str) -> None:
    [process] = [process for process, command in marked(run_id).items() if title in command]
    os.kill(process, signal.SIGKILL)


async def reach(http: aiohttp.ClientSession, place: str, segments: int) -> int:
    """How many are done once there are so many. While the replica starts again an answer is a 503."""
    until_s = time.monotonic() + 60
    while True:
        async with http.get(place) as answer:
            assert answer.status in (200, 503), await answer.text()
            job = await answer.json()
        if answer.status == 200 and (done := job["segments"]["done"]) >= segments:
            assert isinstance(done, int)
            return done
        assert time.monotonic() < until_s, job
        await asyncio.sleep(0.1)


async def fetched(http: aiohttp.ClientSession, path: str) -> bytes:
    async with http.get(path) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.read()
