"""A step of load and its end, on this machine, with the embedded model."""

import asyncio

import aiohttp
import pytest

from deployments.config import TalkerConfig
from serve_app import config
from tests.e2e.speech import PATH, body, fetch
from tests.scale.conftest import client, server
from tests.scale.pools import Sizes, pool_sizes, until

pytestmark = pytest.mark.anyio

POOL = config.PoolConfig(num_cpus=0.2)
STEP = config.AppConfig(
    model="embedded",
    api=config.ApiSettings(admission=config.AdmissionSettings(max_line_s=100, max_wait_s=100, max_late_s=100)),
    talker=TalkerConfig(max_num_seqs=2),
    talker_pool=POOL,
    codec_pool=POOL,
    talker_scaling=config.TalkerScalingConfig(max_replicas=3, scale_down_window_s=5),
    codec_scaling=config.CodecScalingConfig(max_replicas=3, streams_per_replica=2, scale_down_window_s=5),
)
LISTENERS = 6  # three replicas' worth of each pool
ALL_RUN = Sizes((3, 3), (3, 3))
ONE_EACH = Sizes((1, 1), (1, 1))


async def listen(http: aiohttp.ClientSession, number: int, enough: asyncio.Event) -> int:
    """Utterances heard by one listener, one after the other; raises where any of them fails."""
    heard = 0
    while not enough.is_set():
        pcm = await fetch(http, body(ignore_eos=True, max_new_tokens=41, seed=number * 1000 + heard))
        assert len(pcm) > 0
        heard += 1
    return heard


async def test_both_pools_grow_by_their_queues_and_shrink_again_and_no_request_fails() -> None:
    with server(STEP) as url:
        async with client(url) as http:
            assert pool_sizes() == ONE_EACH
            enough = asyncio.Event()
            listeners = [asyncio.create_task(listen(http, number, enough)) for number in range(LISTENERS)]
            await until(lambda sizes: sizes == ALL_RUN)
            enough.set()
            assert all(await asyncio.gather(*listeners))
            await until(lambda sizes: sizes == ONE_EACH)
            assert len(await fetch(http, body())) > 0


ZERO = config.AppConfig(
    model="embedded",
    api=config.ApiSettings(admission=config.AdmissionSettings(start_wait_s=0.5, max_wait_s=2.5)),
    talker_scaling=config.TalkerScalingConfig(min_replicas=0, scale_down_window_s=1, scale_to_zero_after_s=1),
)


async def test_the_talker_pool_goes_to_zero_and_the_first_request_wakes_it() -> None:
    with server(ZERO) as url:
        async with client(url) as http:
            assert len(await fetch(http, body())) > 0
            await until(lambda sizes: sizes.talkers == (0, 0))
            async with http.post(PATH, json=body()) as refused:
                assert refused.status == 503
                assert int(refused.headers["Retry-After"]) >= 1
            await until(lambda sizes: sizes.talkers[1] == 1)
            assert len(await fetch(http, body())) > 0
