"""Attacks on stored data: voices, their texts and files, dictionaries, and jobs of many parts."""

import asyncio
import io
import json
import secrets
from functools import cache

import aiohttp
import numpy as np
import soundfile

from tools.experiments.faults.intruder import CONTEXTS, MIB, OTHERS_S, Broken, Intruder, status_of

VOICES, DICTIONARIES = "/v1/audio/voices", "/v1/pronunciation-dictionaries"
LISTINGS, ARCHIVES, RECORDINGS, TYPED = 8, 12, 4, 2000
LONG = "word " * (14 * MIB // 5)
JOBS = "/v1/audio/jobs"
PARTS, PART_LISTS = 20_000, 12
MANY_PARTS = 100_000  # too many to plan in time
FETCHES = 40
VOICE = {"voice": "ryan", "max_new_tokens": 25, "ignore_eos": True}


@cache
def noise(seconds: float, rate: int = 96_000) -> bytes:
    """Return a WAV file that FLAC can hardly compress: at most 8.6 MB in 30 s."""
    file = io.BytesIO()
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, round(seconds * rate))
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_24")
    return file.getvalue()


def form(recording: bytes, **fields: str) -> aiohttp.FormData:
    sent = aiohttp.FormData({**fields, "prepare": "none"})
    sent.add_field("audio_sample", recording, filename="a.wav")
    return sent


async def _stored(http: aiohttp.ClientSession, path: str, recording: bytes, **fields: str) -> str:
    async with http.post(path, data=form(recording, **fields)) as answer:
        await answer.read()
        return str(answer.status)


async def stores_a_long_transcript(me: Intruder) -> str:
    """Store a transcript of 14 MiB, which a talker would have to tokenize for each request with the voice."""
    async with me.http() as http:
        return await _stored(http, VOICES, noise(1), name=secrets.token_hex(8), ref_text=LONG)


async def stores_long_words_and_lists_them(me: Intruder) -> str:
    """Store descriptions of 14 MiB, then list the voices that many times at once."""
    async with me.http() as http:
        status = await _stored(http, VOICES, noise(1), name=secrets.token_hex(8), description=LONG)
        listed = await asyncio.gather(*(status_of(http, VOICES) for _ in range(LISTINGS)))
        return next((each for each in listed if each != "200"), status)


async def asks_for_archives(me: Intruder) -> str:
    """Download a voice with four recordings of eight megabytes twelve times at once."""
    async with me.http() as http:
        name = secrets.token_hex(8)
        status = await _stored(http, VOICES, noise(29.5), name=name)
        for number in range(1, RECORDINGS):
            await _stored(http, f"{VOICES}/{name}", noise(29.5), style=f"style{number}")
        got = await asyncio.gather(*(status_of(http, f"{VOICES}/{name}/file") for _ in range(ARCHIVES)))
        await http.delete(f"{VOICES}/{name}")
        return max([status, *got])


async def types_beside_a_lexicon(me: Intruder) -> str:
    """Store a thousand words with equal beginnings, and send text one character at a time."""
    rules = [{"string_to_replace": f"a {'b ' * (n % 35)}{n}", "type": "alias", "alias": "c"} for n in range(1000)]
    async with me.http() as http:
        sent = {"name": secrets.token_hex(8), "rules": rules}
        async with http.post(f"{DICTIONARIES}/add-from-rules", json=sent) as answer:
            made = await answer.json()
        if "id" not in made:
            return str(answer.status)
        locator = {"pronunciation_dictionary_id": made["id"]}
        begin = {"context_id": "one", "text": "a", "pronunciation_dictionary_locators": [locator]}
        typed = ({"context_id": "one", "text": "a "[n % 2]} for n in range(TYPED))
        said = await me.say(CONTEXTS, map(json.dumps, (begin, *typed)))
        await http.delete(f"/pronunciation-dicts/{made['id']}")
        return said


async def _made(http: aiohttp.ClientSession, text: str, parts: int) -> tuple[str, str]:
    """Create a job, and return the status and the job's path."""
    async with http.post(JOBS, json={**VOICE, "inputs": [{"input": text}] * parts}) as answer:
        job = await answer.json()
        return str(answer.status), f"{JOBS}/{job.get('id', 'none')}"


async def lists_many_parts(me: Intruder) -> str:
    """Request twelve lists of 20,000 parts at once."""
    async with me.http() as http:
        status, place = await _made(http, "Hi.", PARTS)
        async with http.post(f"{place}/cancel") as answer:
            await answer.read()
        got = await asyncio.gather(*(status_of(http, f"{place}/parts") for _ in range(PART_LISTS)))
        await http.delete(place)
        return max([status, *got])


async def fetches_finished_audio(me: Intruder) -> str:
    """Request forty encodings of one job's audio at once, repeatedly."""
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
    """Create a job of 100,000 parts, and check that another key's job of one part completes."""
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
