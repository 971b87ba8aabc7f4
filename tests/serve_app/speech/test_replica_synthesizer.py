"""The ingress's synthesizer among codec replicas that die: every sample comes once."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Self

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError

from deployments import protocol
from deployments.config import TalkerConfig
from deployments.errors import CodecLost, NotReady, TalkerLost
from deployments.protocol import ClonePrompt, FinishReason, FrameChunk, ModelInfo, PcmChunk, Reference, SynthesisRequest
from deployments.serving import ray_private
from serve_app.config import AdmissionSettings
from serve_app.speech import replica_synthesizer
from serve_app.speech.replica_synthesizer import Deployed, ReplicaSynthesizer
from tests.deployments.serving.test_handles import from_replica
from tests.serve_app.fake import CUSTOM_VOICE
from tools.suites.listening import one_deployed

pytestmark = pytest.mark.anyio

REQUEST = SynthesisRequest("r", "Hello.", voice="ryan")
ON_GPU = replace(CUSTOM_VOICE, talker_on_gpu=True)
GROUPS, SAMPLES = 16, 1920
DEAD = ActorUnavailableError("gone", b"0" * 16)


class Handle:
    """A handle to replicas, which remembers what it was asked."""

    deployment_name, method = "Talker", "generate"

    def __init__(self) -> None:
        self.requests: list[SynthesisRequest] = []

    def options(self, *, method_name: str, stream: bool) -> Self:
        assert (method_name, stream) == (self.method, True)
        return self

    def remote(self, request: SynthesisRequest) -> Self:
        self.requests.append(request)
        return self

    def cancel(self) -> None:
        pass


class Codec(Handle):
    """Each replica gives so many frames more, one a chunk, and then dies of an error."""

    deployment_name, method = "Codec", "synthesize"

    def __init__(self, total: int, *scripts: tuple[int, Exception], chunk_bytes: int = 1) -> None:
        super().__init__()
        self._total, self._chunk_bytes = total, chunk_bytes
        self._scripts = list(scripts)

    async def __aiter__(self) -> AsyncGenerator[PcmChunk, None]:
        yield PcmChunk(b"", np.zeros((0, 0), np.int16), 0)
        resume = self.requests[-1].resume
        done = 0 if resume is None else len(resume.codes)
        count, error = self._scripts.pop(0) if self._scripts else (self._total - done, None)
        for number in range(done, done + count):
            prompt = read_by_replica(self.requests[-1].reference) if number == done else None
            codes, pcm = np.full((1, GROUPS), number, np.int16), bytes([number]) * self._chunk_bytes
            yield PcmChunk(pcm, codes, 3, None, (number + 1) * SAMPLES, clone_prompt=prompt)
        if error is not None:
            raise error
        yield PcmChunk(b"", np.zeros((0, GROUPS), np.int16), 3, FinishReason.STOP, self._total * SAMPLES)


async def listen(codec: Codec, request: SynthesisRequest = REQUEST) -> list[PcmChunk]:
    synthesizer = ReplicaSynthesizer(one_deployed(codec))
    async with aclosing(synthesizer.synthesize(request, CUSTOM_VOICE)) as chunks:
        return [chunk async for chunk in chunks]


def read_by_replica(reference: Reference | None) -> ClonePrompt | None:
    """What a talker answers to a recording that comes as samples."""
    if reference is None or reference.prompt is not None:
        return None
    codes = None if reference.x_vector_only else np.full((2, GROUPS), len(reference.samples), np.int16)
    return ClonePrompt(reference.samples[:4], codes)


def clone(number: int, *, x_vector_only: bool = False) -> SynthesisRequest:
    return replace(REQUEST, reference=Reference(np.full(100, number, np.float32), "Said.", x_vector_only))


def sent(requests: list[SynthesisRequest]) -> list[str]:
    """Of the recording, to replica after replica."""
    references = [request.reference for request in requests]
    assert all(each is not None and (each.audio is None) == (each.prompt is not None) for each in references)
    return ["prompt" if each is not None and each.prompt is not None else "samples" for each in references]


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


async def test_the_next_replica_learns_what_the_listener_has_in_hand() -> None:
    codec = Codec(3, (0, DEAD), (2, DEAD), chunk_bytes=2 * 60 * CUSTOM_VOICE.sample_rate)
    await listen(codec)
    resumes = [request.resume for request in codec.requests]
    assert resumes[:2] == [None, None]
    assert resumes[2] is not None
    assert 100.0 < resumes[2].in_hand_s <= 120.0


async def test_before_the_first_chunk_it_begins_again() -> None:
    codec = Codec(2, (0, DEAD))
    assert b"".join(chunk.pcm for chunk in await listen(codec)) == bytes(range(2))
    assert codec.requests == [REQUEST, replace(REQUEST, is_retry=True)]


async def test_samples_are_sent_until_a_codec_has_answered_for_them() -> None:
    codec = Codec(3, (0, DEAD), (1, DEAD))
    await listen(codec, clone(1))  # two replicas die, the second behind its first chunk
    await listen(codec, clone(1))
    await listen(codec, clone(2))
    assert sent(codec.requests) == ["samples", "samples", "prompt", "prompt", "samples"]


class CloningTalker(Handle):
    """Talkers that bring audio with each frame; each dies behind so many frames, the last one does not."""

    def __init__(self, *dies_behind: int) -> None:
        super().__init__()
        self._dies_behind = list(dies_behind)

    async def __aiter__(self) -> AsyncGenerator[FrameChunk, None]:
        request = self.requests[-1]
        prompt, done = read_by_replica(request.reference), 0 if request.prefix is None else len(request.prefix)
        yield FrameChunk(np.zeros((0, GROUPS), np.int16), 3)
        left = self._dies_behind.pop(0) if self._dies_behind else 4 - done
        for number in range(done, done + left):
            codes = np.full((1, GROUPS), number, np.int16)
            yield FrameChunk(codes, 3, None, b"\1\1" * SAMPLES, clone_prompt=prompt if number == done else None)
        if done + left < 4:
            raise from_replica(TalkerLost("killed"))
        yield FrameChunk(np.zeros((0, GROUPS), np.int16), 3, FinishReason.STOP)


async def told(synthesizer: ReplicaSynthesizer, request: SynthesisRequest, info: ModelInfo = ON_GPU) -> protocol.Codes:
    async with aclosing(synthesizer.synthesize(request, info)) as chunks:
        return np.concatenate([chunk.codes async for chunk in chunks])


def beside(talker: CloningTalker, codec: Codec) -> ReplicaSynthesizer:
    return ReplicaSynthesizer(one_deployed(codec, talker=talker))


async def test_samples_are_sent_until_a_talker_has_answered_for_them() -> None:
    talker = CloningTalker(0, 2, 0)
    synthesizer = beside(talker, Codec(0))
    for request in (clone(3), clone(3), clone(4)):
        assert (await told(synthesizer, request))[:, 0].tolist() == [0, 1, 2, 3]
    assert sent(talker.requests) == ["samples", "samples", "prompt", "prompt", "prompt", "samples"]
    assert [request.gpu_frames for request in talker.requests] == [protocol.ALL_FRAMES] * 6


async def test_who_waits_in_a_long_text_goes_by_what_its_first_segment_has_brought() -> None:
    """Its segments are asked for with the request as it came."""
    talker, request = CloningTalker(), clone(5)
    for segment in (request, replace(request, continues=True)):
        await told(beside(talker, Codec(0)), segment)
    assert sent(talker.requests) == ["samples", "prompt"]


async def test_two_at_once_and_one_that_leaves() -> None:
    talker = CloningTalker()
    synthesizer = beside(talker, Codec(0))
    left, heard = (synthesizer.synthesize(clone(6), ON_GPU) for _ in range(2))
    async with aclosing(left), aclosing(heard):
        await anext(left)
        assert [chunk.finish_reason async for chunk in heard][-1] is FinishReason.STOP
    await told(synthesizer, clone(6))
    assert sent(talker.requests)[-1] == "prompt"


@pytest.mark.parametrize(
    ("x_vector_only", "codec_asked", "talker_sent"), [(False, 1, ["prompt"]), (True, 0, ["samples", "prompt"])]
)
async def test_a_talker_on_a_cpu_may_be_asked(x_vector_only: bool, codec_asked: int, talker_sent: list[str]) -> None:
    codec, talker = Codec(1), CloningTalker()
    synthesizer, request = beside(talker, codec), clone(7 + x_vector_only, x_vector_only=x_vector_only)
    for _ in range(2):
        await told(synthesizer, request, CUSTOM_VOICE)
    assert sent(codec.requests) == ["samples"] * codec_asked
    assert sent(talker.requests) == talker_sent


class Describing:
    """A handle to a codec pool that tells of a model once it may, and where notes are left meanwhile."""

    deployment_name = "Codec"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_tell = asyncio.Event()

    def options(self, *, method_name: str) -> "Describing":
        assert method_name == "describe"
        return self

    async def remote(self, *model: str) -> ModelInfo:
        self.asked += model
        await self.may_tell.wait()
        return CUSTOM_VOICE


def deployed(checkpoint: str, codec: "Describing") -> Deployed:
    pools = ("Talker-clones", "Codec")
    return Deployed("clones", checkpoint, TalkerConfig(), False, AdmissionSettings(), pools, codec)  # type: ignore[arg-type]


async def test_a_model_whose_files_are_elsewhere_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for beside requests, and what it tells is left for ingresses that start while it is at zero."""
    notes: dict[str, bytes] = {}
    monkeypatch.setattr(ray_private, "get_note", notes.get)
    monkeypatch.setattr(ray_private, "put_note", notes.__setitem__)
    codec = Describing()
    synthesizer = ReplicaSynthesizer(deployed("/elsewhere/Base", codec))
    for _ in range(2):
        with pytest.raises(NotReady):
            await synthesizer.describe()
        await asyncio.sleep(0)
    assert codec.asked == ["clones"]
    codec.may_tell.set()
    assert synthesizer._describe_task is not None
    await synthesizer._describe_task
    info = await synthesizer.describe()
    assert (info.name, info.checkpoint, info.route) == ("clones", "/elsewhere/Base", "clones")
    later = ReplicaSynthesizer(deployed("/elsewhere/Base", Describing()))
    assert await later.describe() == info


async def test_one_call_describes_the_model_to_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that answer late, as busy ones do, are not asked again by each request."""
    monkeypatch.setattr(replica_synthesizer, "_DESCRIBE_TIMEOUT_S", 0.01)
    codec = Describing()
    synthesizer = ReplicaSynthesizer(one_deployed(codec))
    with pytest.raises(NotReady):
        await synthesizer.describe()
    leaving = asyncio.create_task(synthesizer.describe())
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait((leaving,))
    codec.may_tell.set()
    assert synthesizer._describe_task is not None
    await synthesizer._describe_task
    assert await synthesizer.describe() == CUSTOM_VOICE
    assert codec.asked == [""]


async def test_a_replica_that_hangs_is_not_the_only_one_asked_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_synthesizer, "_ASK_TIMEOUT_S", 0.01)
    codec = Describing()
    synthesizer = ReplicaSynthesizer(one_deployed(codec))
    with pytest.raises(NotReady):
        await synthesizer.describe()
    monkeypatch.undo()
    codec.may_tell.set()
    assert await synthesizer.describe() == CUSTOM_VOICE
    assert codec.asked == ["", ""]


async def test_a_model_at_zero_is_described_from_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Describing()
    info = await ReplicaSynthesizer(deployed("embedded", codec)).describe()
    assert (info.name, info.voices[0], codec.asked) == ("clones", "nora", [])


async def test_a_talker_that_decodes_is_asked_itself_for_its_model() -> None:
    talker = Describing()
    talker.may_tell.set()
    assert await ReplicaSynthesizer(one_deployed(Codec(1), talker=talker)).describe() == CUSTOM_VOICE
