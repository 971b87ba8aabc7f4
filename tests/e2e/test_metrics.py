"""What was spoken shows in the metrics of this machine, a few seconds later. `make metrics` looks at their values."""

import asyncio
import re

import aiohttp
import pytest

from tests.e2e.speech import BOUND_S, body, fetch

pytestmark = pytest.mark.anyio

EXPECTED = {
    "talkray_ttfb_seconds_count", "talkray_ttfp_seconds_count", "talkray_ttfa_seconds_count",
    "talkray_onset_seconds_count", "talkray_chunk_lateness_seconds_count", "talkray_rtf_count",
    "talkray_audio_seconds_total", "talkray_ingress_streams", "talkray_queue_depth", "talkray_batch_size_count",
    "talkray_step_seconds_count", "talkray_kv_blocks_used_ratio", "talkray_codec_lag_seconds",
    "talkray_decoded_seconds_total", "talkray_replicas_wanted", "talkray_replicas_running",
}  # fmt: skip


async def exported(http: aiohttp.ClientSession, path: str = "/metrics") -> set[str]:
    async with http.get(path) as answer:
        assert answer.status == 200
        return set(re.findall(r"^ray_(\w+){", await answer.text(), re.MULTILINE))


async def test_every_stage_exports_what_it_measures(http: aiohttp.ClientSession) -> None:
    await fetch(http, body(max_new_tokens=21))
    async with asyncio.timeout(BOUND_S):
        while not await exported(http) >= EXPECTED:  # noqa: ASYNC110, another process changes it
            await asyncio.sleep(0.5)


async def test_rays_own_are_there_on_request(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(BOUND_S):
        while not await exported(http):  # noqa: ASYNC110, another process changes it
            await asyncio.sleep(0.5)
    assert all(name.startswith("talkray_") for name in await exported(http))
    assert not all(name.startswith("talkray_") for name in await exported(http, "/metrics/all"))
