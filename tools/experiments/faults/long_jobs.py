"""What hostile clients do with jobs: many parts, lists of them, finished audio."""

import asyncio

import aiohttp

from tools.experiments.faults.intruder import OTHERS_S, Broken, Intruder, status_of

JOBS = "/v1/audio/jobs"
PARTS, LISTINGS = 20_000, 12
MANY_PARTS = 100_000  # more than are planned in time
FETCHES = 40
VOICE = {"voice": "ryan", "max_new_tokens": 25, "ignore_eos": True}


async def _made(http: aiohttp.ClientSession, text: str, parts: int) -> tuple[str, str]:
    """The status, and the path of the job."""
    async with http.post(JOBS, json={**VOICE, "inputs": [{"input": text}] * parts}) as answer:
        job = await answer.json()
        return str(answer.status), f"{JOBS}/{job.get('id', 'none')}"


async def lists_many_parts(me: Intruder) -> str:
    """Twelve lists of 20,000 parts at once."""
    async with me.http() as http:
        status, place = await _made(http, "Hi.", PARTS)
        async with http.post(f"{place}/cancel") as answer:
            await answer.read()
        got = await asyncio.gather(*(status_of(http, f"{place}/parts") for _ in range(LISTINGS)))
        await http.delete(place)
        return max([status, *got])


async def fetches_finished_audio(me: Intruder) -> str:
    """Forty encodings of the audio of one job at once, again and again."""
    async with me.http() as http:
        status, place = await _made(http, "What I have made is encoded again and again.", 20)
        while status == "201":
            async with http.get(place) as answer:
                job = await answer.json()
            if answer.status != 200 or job["status"] == "completed":
                break
            await asyncio.sleep(0.2)
        path = f"{place}/audio?response_format=opus"
        for _ in range(3):
            await asyncio.gather(*(status_of(http, path) for _ in range(FETCHES)))
        await http.delete(place)
        return status


async def plans_a_job_without_end(me: Intruder) -> str:
    """A job of 100,000 parts, while another key makes one of one part."""
    async with me.http() as http, me.polite.http() as other:
        large = asyncio.create_task(_made(http, "Hi.", MANY_PARTS))
        try:
            status, place = await asyncio.wait_for(_made(other, "Hello.", 1), OTHERS_S)
        except TimeoutError:
            raise Broken(f"another key waits over {OTHERS_S:g} s for a job of one part") from None
        await other.delete(place)
        got, place = await large
        await http.delete(place)
        return max(status, got)
