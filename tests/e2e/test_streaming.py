import asyncio
import json
import os

import aiohttp
import pytest

from tests.e2e.speech import BOUND_S, EXPORTED_OFTEN_S, PATH, Pools, body, endless, fetch, shared_calls
from tools.experiments.faults.polite import difference

pytestmark = pytest.mark.anyio


async def test_first_bytes_arrive_while_the_talker_still_speaks(http: aiohttp.ClientSession, pools: Pools) -> None:
    async with http.post(PATH, json=endless()) as answer:
        assert await answer.content.readany()
        assert await pools.load() == (1, 0)
        answer.close()
    await pools.reach(running=0)


async def test_websocket_speaks_one_utterance_after_the_other(http: aiohttp.ClientSession) -> None:
    async with http.ws_connect(f"{PATH}/ws") as socket:
        for frames in (3, 5):
            asked = body(max_new_tokens=frames + 1, ignore_eos=True, leading_silence=True)
            await socket.send_json({"type": "speak", **asked})
            started = await socket.receive_json()
            assert started["type"] == "started"
            num_bytes = 0
            while (message := await socket.receive()).type is aiohttp.WSMsgType.BINARY:
                assert len(message.data) <= 4096
                num_bytes += len(message.data)
            done = json.loads(message.data)
            assert (done["type"], done["finish_reason"], done["frames"]) == ("done", "length", frames)
            assert done["samples"] * 2 == num_bytes > 0


async def test_a_seed_gives_the_same_audio_again(http: aiohttp.ClientSession) -> None:
    request = body(seed=7, ignore_eos=True, max_new_tokens=30)
    once = await fetch(http, request)
    assert difference(await fetch(http, request), once) is None
    other = await fetch(http, {**request, "seed": 8})
    assert difference(other, once) is not None


async def test_a_seed_gives_the_same_audio_among_others(http: aiohttp.ClientSession) -> None:
    request = body(seed=7, ignore_eos=True, max_new_tokens=30)
    alone = await fetch(http, request)
    others = [fetch(http, {**request, "seed": seed, "input": "Others. " * seed}) for seed in range(1, 7)]
    among, *_ = await asyncio.gather(fetch(http, request), *others)
    assert difference(among, alone) is None


async def test_a_seed_gives_the_same_codes_among_others(pools: Pools) -> None:
    alone = await pools.codes(seed=7, frames=20)
    among, *others = await asyncio.gather(*(pools.codes(seed=seed, frames=20) for seed in (7, 1, 2, 3, 4, 5, 6)))
    assert among.tolist() == alone.tolist()
    assert all(other.tolist() != alone.tolist() for other in others)


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
