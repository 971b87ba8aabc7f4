"""The replica without Ray around it: what its batching decorator does."""

import asyncio
import gc
import weakref
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from deployments.autoscaling_records import CodecRecord
from deployments.codec.batch import Decoded, DecodeTask
from deployments.codec.decoder_state import DecoderState
from deployments.codec.deployment import CodecReplica
from deployments.codec.pool import service
from deployments.codec.pool.service import Placement
from deployments.config import CodecConfig
from deployments.errors import CodecLost, NotReady
from deployments.protocol import SynthesisRequest
from deployments.serving import ray_private
from tests.deployments.serving.test_handles import Handle
from tests.serve_app.fake import CUSTOM_VOICE

WORKERS = 3


class Held:
    def __init__(self, replica: CodecReplica) -> None:
        self.batches: list[list[float]] = []  # deadlines
        self.released = asyncio.Event()
        self._gate = replica._service.gate

    async def decode_batch(self, tasks: list[DecodeTask]) -> list[Decoded]:
        self._gate.note_gathered()
        self.batches.append([task.deadline_s for task in tasks])
        await self.released.wait()
        return [Decoded(np.zeros(1, np.int16), task.state) for task in tasks]


def task(deadline_s: float, frames: int) -> DecodeTask:
    return DecodeTask(np.zeros((frames, 16), np.int16), DecoderState(0, ()), deadline_s)


@pytest.fixture
def placement(monkeypatch: pytest.MonkeyPatch) -> Placement:
    """That of a service which decodes nothing."""
    placed = Placement("hybrid")
    nothing = SimpleNamespace(placement=placed, gate=None, frame_s=0.08, failure=None, decode_stream=None, forget=len)
    monkeypatch.setattr(service, "CodecService", lambda *_, **__: nothing)
    return placed


@pytest.mark.anyio
@pytest.mark.parametrize("on_gpu", [True, False])
async def test_where_its_talkers_run_is_asked_once(placement: Placement, on_gpu: bool) -> None:
    talkers = Handle(replace(CUSTOM_VOICE, talker_on_gpu=on_gpu))
    replica = CodecReplica("model", CodecConfig(), {"": talkers}, {}, 0.25)  # type: ignore[dict-item]
    assert not placement.talker_on_gpu
    for _ in range(2):
        await replica.synthesize(SynthesisRequest("r", "Hello."))
        assert talkers.calls == [("describe", False), ()]
    assert placement.talker_on_gpu is on_gpu


@pytest.mark.anyio
@pytest.mark.parametrize("error", [ActorDiedError(), BackPressureError(1, 1), NotReady("not yet")])
async def test_starts_need_no_talkers(placement: Placement, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    talkers = Handle(error)
    replica = CodecReplica("model", CodecConfig(), {"": talkers}, {}, 0.25)  # type: ignore[dict-item]
    for _ in range(2):
        await replica.check_health()
        assert talkers.calls == [("describe", False), ()]
    assert not placement.talker_on_gpu
    assert await replica.forget((b"a voice", b"another")) == 2
    assert replica.record_autoscaling_stats().keys() == {field.name for field in fields(CodecRecord)}
    monkeypatch.setattr(replica._service, "failure", "hung")
    with pytest.raises(CodecLost, match="hung"):
        await replica.check_health()


def make_replica(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *, workers: int) -> CodecReplica:
    settings = SimpleNamespace(
        _deployment_config=SimpleNamespace(max_ongoing_requests=256), deployment="Codec", replica_tag="1"
    )
    monkeypatch.setattr(serve, "get_replica_context", lambda: settings)
    monkeypatch.setattr(ray_private, "this_replica", lambda: None)
    return CodecReplica(str(checkpoint), CodecConfig(workers=workers), {"": None}, {}, 0.25)


@pytest.mark.anyio
async def test_an_outcome_that_is_an_error_is_raised(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`@serve.batch` returns what a batch has at a task's place, also an exception."""
    replica = make_replica(checkpoint, monkeypatch, workers=1)

    async def decode_batch(tasks: list[DecodeTask]) -> list[Exception]:
        return [CodecLost("out of memory")]

    replica._service.decode_batch = decode_batch  # type: ignore[method-assign, assignment]
    with pytest.raises(CodecLost, match="out of memory"):
        await replica._service.gate.submit(task(1.0, 1))


@pytest.mark.anyio
async def test_workers_decode_at_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself `@serve.batch` begins a batch when the one before has ended."""
    replica = make_replica(checkpoint, monkeypatch, workers=WORKERS)
    held = Held(replica)
    replica._service.decode_batch = held.decode_batch  # type: ignore[method-assign]
    # Of different lengths, which are different calls; two of one length share theirs.
    tasks = [task(1.0, 1), task(2.0, 2), task(3.0, 4), task(4.0, 2), task(5.0, 1)]
    tasks = [asyncio.create_task(replica._service.gate.submit(each)) for each in tasks]
    async with asyncio.timeout(10):
        while len(held.batches) < WORKERS:  # noqa: ASYNC110, Serve's own tasks begin them
            await asyncio.sleep(0.001)
    held.released.set()
    await asyncio.gather(*tasks)
    assert held.batches == [[1.0, 5.0], [2.0, 4.0], [3.0]]
    # Where no loop runs, Serve's queue makes one to see whether it runs, and leaves it open: a later test would fail.
    collected = weakref.ref(replica)
    del replica, held
    gc.collect()
    assert collected() is None
