"""A share of the decoding beside the talker, over real handles. On a CPU nothing asks for it by itself."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import ray
from ray import serve

from deployments.protocol import ALL_FRAMES, Codes, Sampling, SynthesisRequest
from serve_app.cli.serve.local_server import APP_NAME
from tests.e2e.speech import Pools

pytestmark = pytest.mark.anyio
FRAMES = 30


@ray.remote(num_cpus=0)
class Codec:
    """A codec replica's service that believes its talker has a GPU."""

    def __init__(self) -> None:
        from deployments.codec.pool.service import CodecService
        from deployments.config import CodecConfig

        async def decode(job):  # type: ignore[no-untyped-def]
            (outcome,) = await self._service.decode_batch([job])
            return outcome

        self._service = CodecService("embedded", CodecConfig(precision="float32"), decode=decode)
        self._service.placement.talker_on_gpu = True
        self._talker = serve.get_deployment_handle("Talker", APP_NAME)

    async def speak(self, gpu_frames: int, *, leave_after: int | None = None) -> tuple[Codes, np.ndarray, int]:
        """Codes and samples of the same utterance, and the frames whose audio the talker brought."""
        from deployments.errors import TalkerLost
        from deployments.serving.handles import read_replica

        from_talker = 0

        async def generate(request):  # type: ignore[no-untyped-def]
            nonlocal from_talker
            async with aclosing(read_replica(self._talker, "generate", request, lost=TalkerLost)) as chunks:
                async for chunk in chunks:
                    from_talker += len(chunk.pcm) // (2 * 1920)
                    yield chunk

        self._service.placement._gpu_frames = lambda capacity: gpu_frames
        options = Sampling(max_new_tokens=FRAMES + 1 if leave_after is None else 2000)
        request = SynthesisRequest(
            "placed", "Same text.", voice="nora", sampling=options, seed=5, ignore_eos=True, leading_silence=True
        )
        codes, pcm = [], b""
        async with aclosing(self._service.decode_stream(request, generate)) as chunks:
            async for chunk in chunks:
                codes.append(chunk.codes)
                pcm += chunk.pcm
                if leave_after is not None and len(pcm) >= leave_after:
                    break
        return np.concatenate([part for part in codes if len(part)]), np.frombuffer(pcm, np.int16), from_talker


@ray.remote(num_cpus=0)
class Ingress:
    """An ingress's synthesizer, as it is where the talker's GPU decodes to the end."""

    def __init__(self) -> None:
        from serve_app.speech.replica_synthesizer import ReplicaSynthesizer
        from tools.suites.listening import one_deployed

        codec, talker = (serve.get_deployment_handle(name, APP_NAME) for name in ("Codec", "Talker"))
        self._synthesizer = ReplicaSynthesizer(one_deployed(codec, talker=talker))

    async def speak(self, request: SynthesisRequest, *, leave_after: int | None = None) -> tuple[Codes, np.ndarray]:
        codes, pcm = [], b""
        info = await self._synthesizer.describe()
        async with aclosing(self._synthesizer.synthesize(request, info)) as chunks:
            async for chunk in chunks:
                codes.append(chunk.codes)
                pcm += chunk.pcm
                if leave_after is not None and len(pcm) >= leave_after:
                    break
        return np.concatenate(codes), np.frombuffer(pcm, np.int16)


@pytest.fixture(scope="module")
def speak(server: str) -> Callable[..., Awaitable[tuple[Codes, np.ndarray, int]]]:
    codec = Codec.remote()
    return lambda *args, **options: codec.speak.remote(*args, **options)


async def test_every_placement_sounds_the_same(speak: Callable[..., Awaitable[tuple[Codes, np.ndarray, int]]]) -> None:
    codes, pcm, from_talker = await speak(0)
    assert (len(codes), len(pcm), from_talker) == (FRAMES, FRAMES * 1920, 0)
    for gpu_frames in (1, 12, FRAMES - 1, FRAMES + 1, ALL_FRAMES):
        other_codes, other_pcm, from_talker = await speak(gpu_frames)
        assert from_talker == min(gpu_frames, FRAMES)
        assert np.array_equal(other_codes, codes)
        assert other_pcm.shape == pcm.shape
        assert np.abs(other_pcm.astype(int) - pcm).max() <= 1


@pytest.mark.parametrize("gpu_frames", [12, ALL_FRAMES])
async def test_leaving_frees_the_talker(
    speak: Callable[..., Awaitable[tuple[Codes, np.ndarray, int]]], pools: Pools, gpu_frames: int
) -> None:
    await speak(gpu_frames, leave_after=1)
    await pools.reach(running=0)


async def test_an_ingress_that_asks_the_talker_itself_gets_the_same(
    speak: Callable[..., Awaitable[tuple[Codes, np.ndarray, int]]], pools: Pools
) -> None:
    codes, pcm, _ = await speak(0)
    ingress = Ingress.remote()
    options = Sampling(max_new_tokens=FRAMES + 1)
    request = SynthesisRequest(
        "direct", "Same text.", voice="nora", sampling=options, seed=5, ignore_eos=True, leading_silence=True
    )
    other_codes, other_pcm = await ingress.speak.remote(request)
    assert np.array_equal(other_codes, codes)
    assert other_pcm.shape == pcm.shape
    assert np.abs(other_pcm.astype(int) - pcm).max() <= 1
    endless = replace(request, sampling=Sampling(max_new_tokens=2000))
    await ingress.speak.remote(endless, leave_after=1)
    await pools.reach(running=0)
