import asyncio
import os

import aiohttp
import pytest

from tests.e2e.speech import BOUND_S, EXPORTED_OFTEN_S, PATH, body, fetch, shared_calls
from tools.experiments.faults.polite import difference

pytestmark = pytest.mark.anyio


async def test_a_seed_gives_the_same_audio_among_others(http: aiohttp.ClientSession) -> None:
    request = body(seed=7, ignore_eos=True, max_new_tokens=30)
    alone = await fetch(http, request)
    others = [fetch(http, {**request, "seed": seed, "input": "Others. " * seed}) for seed in range(1, 7)]
    among, *_ = await asyncio.gather(fetch(http, request), *others)
    assert difference(among, alone) is None


async def test_sixteen_streams_are_decoded_together(http: aiohttp.ClientSession) -> None:
    await asyncio.sleep(EXPORTED_OFTEN_S)  # what was spoken before is counted by then
    before = await shared_calls(http)
    requests = [body(seed=seed, ignore_eos=True, max_new_tokens=61, leading_silence=True) for seed in range(16)]
    spoken = await asyncio.gather(*(fetch(http, request) for request in requests))
    assert len({len(pcm) for pcm in spoken}) == 1
    async with asyncio.timeout(BOUND_S):
        while await shared_calls(http) == before:  # noqa: ASYNC110, another process changes it
            await asyncio.sleep(0.5)


async def test_serves_own_proxy_speaks_as_well(server: str) -> None:
    """Where HAProxy knows no ingress replica it asks that, which sends requests' scopes to other processes."""
    port = os.environ["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"]
    padded = body(user="x" * (1 << 19))  # more than one part
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as own, own.post(PATH, json=padded) as answer:
        assert answer.status == 200, await answer.text()
        assert await answer.read()
