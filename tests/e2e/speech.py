"""What the tests ask the server, and how they look behind it."""

import asyncio

import aiohttp
import ray
from ray import serve

from deployments.errors import CodecLost, InvalidRequest
from deployments.protocol import SynthesisRequest
from deployments.serving.handles import stream_from_replica
from serve_app.cli.serve.local_server import APP_NAME

PATH = "/v1/audio/speech"
# Bounds a hang; nothing here takes nearly as long.
BOUND_S = 30
# A metric shows up to ten seconds after the event.
EXPORTED_S = 11
# The same on the server of these tests.
EXPORTED_OFTEN_S = 3


def body(text: str = "The quick brown fox jumps over the lazy dog.", **fields: object) -> dict[str, object]:
    return {"model": "qwen3-tts", "input": text, "voice": "alloy", "response_format": "pcm", **fields}


def endless(**fields: object) -> dict[str, object]:
    return body(ignore_eos=True, max_new_tokens=3000, **fields)


async def fetch(http: aiohttp.ClientSession, request: dict[str, object]) -> bytes:
    async with http.post(PATH, json=request) as answer:
        content = await answer.read()
        assert answer.status == 200, content
        return content


async def shared_calls(http: aiohttp.ClientSession) -> float:
    """Decode calls of the codec that had more than one chunk, as `talkray_batch_size` has them a few seconds later."""
    async with http.get("/metrics") as answer:
        lines = [line for line in (await answer.text()).splitlines() if 'pool="codec"' in line]
    calls, alone = "ray_talkray_batch_size_count{", "ray_talkray_batch_size_bucket{"
    num_calls = sum(float(line.split()[-1]) for line in lines if line.startswith(calls))
    return num_calls - sum(float(line.split()[-1]) for line in lines if line.startswith(alone) and 'le="1.0"' in line)


@ray.remote(num_cpus=0)
class Probe:
    """Asks the deployments through their handles, inside Ray: handles want an event loop that ends with it."""

    def __init__(self) -> None:
        self._talker = serve.get_deployment_handle("Talker", APP_NAME)

    async def load(self) -> tuple[int, int]:
        record: dict[str, float] = await self._talker.record_autoscaling_stats.remote()
        return int(record["running"]), int(record["waiting"])

    async def refusal(self, request: SynthesisRequest) -> tuple[str | None, str]:
        """Field and code of the talker's refusal, as the ingress gets it: over two handles."""
        codec = serve.get_deployment_handle("Codec", APP_NAME)
        try:
            async for _ in stream_from_replica(codec, "synthesize", request, lost=CodecLost):
                pass
        except InvalidRequest as error:
            return error.param, error.code
        raise AssertionError("it was spoken")


class Pools:
    def __init__(self) -> None:
        self._probe = Probe.remote()

    async def load(self) -> tuple[int, int]:
        """Sequences that run on the talker, and sequences that wait there."""
        load: tuple[int, int] = await self._probe.load.remote()
        return load

    async def reach(self, *, running: int, waiting: int = 0) -> None:
        async with asyncio.timeout(BOUND_S):
            while await self.load() != (running, waiting):  # noqa: ASYNC110, another process changes it
                await asyncio.sleep(0.01)

    async def refusal(self, request: SynthesisRequest) -> tuple[str | None, str]:
        """Why the talker does not take a request: field and code."""
        refusal: tuple[str | None, str] = await self._probe.refusal.remote(request)
        return refusal
