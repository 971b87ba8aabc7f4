"""The ingress's synthesizer among codec replicas that die: every sample comes once."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError

from deployments.errors import CodecLost, Overloaded
from deployments.protocol import FinishReason, FrameChunk, GenerateRequest, PcmChunk, Reference, SynthesisRequest
from serve_app.ingress import HandleSynthesizer
from tests.deployments.test_handles import from_replica
from tests.serve_app.fake import CUSTOM_VOICE

pytestmark = pytest.mark.anyio

REQUEST = SynthesisRequest("r", "Hello.", voice="ryan")
GROUPS, SAMPLES = 16, 1920
DEAD = ActorUnavailableError("gone", b"0" * 16)


class Codec:
    """A handle to replicas of which each gives so many frames more, one a chunk, and then dies of an error."""

    def __init__(self, total: int, *scripts: tuple[int, Exception]) -> None:
        self._total = total
        self._scripts = list(scripts)
        self.requests: list[SynthesisRequest] = []

    def options(self, *, method_name: str, stream: bool) -> "Codec":
        assert (method_name, stream) == ("synthesize", True)
        return self

    def remote(self, request: SynthesisRequest) -> "Codec":
        self.requests.append(request)
        return self

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> AsyncGenerator[PcmChunk, None]:
        yield PcmChunk(b"", np.zeros((0, 0), np.int16), 0)
        resume = self.requests[-1].resume
        done = 0 if resume is None else len(resume.codes)
        count, error = self._scripts.pop(0) if self._scripts else (self._total - done, None)
        for number in range(done, done + count):
            yield PcmChunk(bytes([number]), np.full((1, GROUPS), number, np.int16), 3, None, (number + 1) * SAMPLES)
        if error is not None:
            raise error
        yield PcmChunk(b"", np.zeros((0, GROUPS), np.int16), 3, FinishReason.STOP, self._total * SAMPLES)


async def listen(codec: Codec) -> list[PcmChunk]:
    async with aclosing(HandleSynthesizer(codec).synthesize(REQUEST)) as chunks:
        return [chunk async for chunk in chunks]


async def test_signs_of_life_stay_inside() -> None:
    chunks = await listen(Codec(3))
    assert [chunk.pcm for chunk in chunks] == [b"\0", b"\1", b"\2", b""]


async def test_a_stream_goes_on_behind_codes_and_position() -> None:
    codec = Codec(7, (2, DEAD), (0, DEAD), (3, from_replica(CodecLost("stuck"))))
    chunks = await listen(codec)
    assert b"".join(chunk.pcm for chunk in chunks) == bytes(range(7))
    assert chunks[-1].finish_reason is FinishReason.STOP
    first, *others = codec.requests
    assert first == REQUEST
    for request, done in zip(others, (2, 2, 5), strict=True):
        assert request.resume is not None
        assert request.resume.codes[:, 0].tolist() == list(range(done))
        assert request.resume.samples == done * SAMPLES


async def test_before_the_first_chunk_it_begins_again() -> None:
    codec = Codec(2, (0, DEAD))
    assert b"".join(chunk.pcm for chunk in await listen(codec)) == bytes(range(2))
    assert codec.requests == [REQUEST, replace(REQUEST, again=True)]


async def test_overload_at_the_start_is_an_answer() -> None:
    codec = Codec(2, (0, from_replica(Overloaded("full", 3.0))))
    with pytest.raises(Overloaded):
        await listen(codec)
    assert len(codec.requests) == 1


class Talker:
    """A handle to a talker that says nothing."""

    def options(self, *, method_name: str, stream: bool) -> "Talker":
        assert (method_name, stream) == ("generate", True)
        return self

    def remote(self, request: GenerateRequest) -> "Talker":
        return self

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> AsyncGenerator[FrameChunk, None]:
        yield FrameChunk(np.zeros((0, GROUPS), np.int16), 3, FinishReason.STOP)


@pytest.mark.parametrize(("on_gpu", "asked"), [(True, 0), (False, 1)])
async def test_a_talker_on_a_gpu_reads_recordings_itself(on_gpu: bool, asked: int) -> None:
    codec = Codec(1)
    synthesizer = HandleSynthesizer(codec, talker=Talker())
    synthesizer._info = replace(CUSTOM_VOICE, talker_on_gpu=on_gpu)
    request = replace(REQUEST, reference=Reference(np.zeros(100, np.float32), "Said."))
    async with aclosing(synthesizer.synthesize(request)) as chunks:
        assert [chunk.finish_reason async for chunk in chunks][-1] is not None
    assert len(codec.requests) == asked


async def test_a_stream_never_just_ends() -> None:
    with pytest.raises(CodecLost):
        await listen(Codec(100, *[(1, DEAD)] * 50))
