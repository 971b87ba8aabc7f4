"""Two codec replicas, their talkers and a client, in one process on a virtual clock: what each stream becomes."""

import asyncio
import gc
import os
import random
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, closing
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray import serve
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from torch import Tensor

from deployments.codec.batch import Decoded, DecodeTask
from deployments.codec.decoder import WarmUpResult
from deployments.codec.decoder_state import DecoderState
from deployments.codec.deployment import CodecReplica
from deployments.codec.pool import service
from deployments.codec.pool.codec import Codec
from deployments.codec.pool.gate import DecodeGate
from deployments.config import CodecConfig, CodecPlacement
from deployments.errors import CodecLost, EngineError, InvalidRequest, Moved, Overloaded, TalkerLost
from deployments.limits import Rate
from deployments.protocol import (
    ClonePrompt,
    Codes,
    FinishReason,
    FrameChunk,
    ModelInfo,
    ModelKind,
    PcmChunk,
    Reading,
    Reference,
    SynthesisRequest,
)
from deployments.serving import handles, metrics, ray_metrics, ray_private
from deployments.serving.failover import with_failover
from deployments.serving.handles import stream_from_replica
from deployments.serving.replica import Replica
from deployments.serving.replica_streams import CodecAudio, TalkerAudio
from tests.clock import Clock
from tests.records import Record, shown
from tests.virtual_time import run_virtual, virtual_clock

RATE, SAMPLES, GROUPS = 300, 24, 4
SILENT, MURMUR, BROKEN = 0, 1, 31  # codes of codebook 0
INFO = ModelInfo("", ModelKind.BASE, (), (), False, RATE, SAMPLES, GROUPS, talker_on_gpu=True)
THIS: ContextVar[SimpleNamespace | None] = ContextVar("this replica", default=None)


def samples(codes: np.ndarray) -> np.ndarray:
    """A frame's loudness depends on its code, and its samples on its number, so that a misplaced one shows."""
    levels = np.where(codes[:, 0] == SILENT, 0.0, np.where(codes[:, 0] == MURMUR, 0.01, 0.25))
    return np.repeat(levels + (levels > 0.1) * codes[:, 1] / 1024, SAMPLES)


def numbers(pcm: bytes) -> str:
    """Which frames these samples are of; . for each that cannot be told."""
    heard = np.frombuffer(pcm, np.int16)[:: SAMPLES // 4] / 32768
    found = [round((value - 0.25) * 1024) for value in heard if value > 0.2]
    return f"{found[0]}-{found[-1]}" if found else "quiet"


class Decoder:
    """A CodecDecoder whose state is the number of the next frame; it tells if a call does not follow its state."""

    config, device, frame_samples = SimpleNamespace(reach=7), SimpleNamespace(type="cuda"), SAMPLES

    def __init__(self, record: Record, draw: random.Random) -> None:
        self.repaired, self._record, self._draw = 0, record, draw
        self._initial = DecoderState(0, (torch.zeros(1),))

    def initial_state(self) -> DecoderState:
        return self._initial

    def state_after(self, codes: Tensor) -> DecoderState:
        self._record("  the state after a recording of", len(codes))
        return DecoderState(len(codes), (torch.zeros(3),))

    def recall(self, codes: Tensor, states: Sequence[DecoderState], *, followed_by: int) -> list[DecoderState]:
        self._call("recall", codes, states, followed_by=followed_by)
        return [DecoderState(state.position + codes.shape[1], ()) for state in states]

    def decode(self, codes: Tensor, states: Sequence[DecoderState]) -> tuple[Tensor, list[DecoderState]]:
        self._call("decode", codes, states)
        if (codes[:, :, 0] == BROKEN).any():
            raise self._draw.choice(
                [EngineError("codes out of range"), MemoryError(), RuntimeError("can't allocate memory")]
            )
        self.repaired += self._draw.random() < 0.03
        audio = torch.stack([torch.from_numpy(samples(each.numpy())) for each in codes])
        return audio, [DecoderState(state.position + codes.shape[1], ()) for state in states]

    def _call(self, kind: str, codes: Tensor, states: Sequence[DecoderState], **more: object) -> None:
        streams, frames = codes.shape[:2]
        asyncio.get_running_loop().call_s = COST_S[0] * (frames * streams + 4) * (0.2 if kind == "recall" else 1)  # type: ignore[attr-defined]
        whose = [
            f"{each[0, 2]}: {each[0, 1]}-{each[-1, 1]} from {state.position}"
            for each, state in zip(codes, states, strict=True)
        ]
        self._record(f"{time.monotonic() - 1000:.3f} {kind} {frames} frames of stream {'; '.join(whose)}", **more)


class Encoder:
    def encode(self, audio: np.ndarray) -> Codes:
        return np.full((len(audio) // 100, GROUPS), 5, np.int16)


@dataclass
class Script:
    """A stream's frames by their codebook 0, how fast they come, and the failures of each attempt."""

    codes: list[int]
    reason: FinishReason | None
    pace_s: float
    size: int  # frames in a message
    failures: list[tuple[int, object]] = field(default_factory=list)  # after so many new frames
    codec_failures: list[tuple[int, object]] = field(default_factory=list)  # after so many messages
    has_readings: bool = False


class Pool:
    """Everything beyond the client: talkers by script, and codec replicas that call them."""

    def __init__(self, record: Record, clock: Clock, draw: random.Random) -> None:
        self.record, self.clock, self.draw = record, clock, draw
        self.scripts: dict[str, Script] = {}
        self.notes: dict[str, list[str]] = {}
        self.codecs: list[tuple[SimpleNamespace, Any]] = []
        self.replica_states = {"RUNNING": 1}
        POOL[:] = [self]

    def note(self, request: SynthesisRequest, event: str) -> None:
        name = THIS.get()
        where = f" at {name.name}" if name else ""
        self.notes[request.request_id].append(f"  {self.clock.now_s - 1000:.3f}{where} {event}")

    async def generate(self, request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        """What a talker replica sends."""
        script, resume, codes = self.scripts[request.request_id], request.resume, request.reference_codes
        told = (
            ""
            if resume is None
            else f", after {len(resume.codes)} frames, {resume.samples} samples, {resume.in_hand_s:.3f} s ahead"
        )
        told += " (retry)" * request.is_retry + f", reference {None if codes is None else len(codes)}"
        marks = " ".join(stage for stage, _ in request.marks)
        self.note(request, f"talker asked: gpu {min(request.gpu_frames, 999)}{told} {marks} {request.model}".rstrip())
        fails_after, failure = script.failures.pop(0) if script.failures else (10**6, None)
        begin = 0 if resume is None else len(resume.codes)
        first_audio = 0 if resume is None else resume.samples // SAMPLES
        frames = np.array([[c, n, int(request.request_id), 0] for n, c in enumerate(script.codes)], np.int16)
        sent, last_audio, tokens = begin, first_audio + request.gpu_frames, 3
        marks, readings, no_codes = (*request.marks, ("codes", time.time_ns())), (), frames[:0]

        def audio(until: int) -> bytes:
            """Samples up to a frame that have not been sent. They come a message later than their codes."""
            nonlocal first_audio
            begin, first_audio = first_audio, max(first_audio, min(until, last_audio))
            return (
                (samples(frames[begin:first_audio]) * 32768).astype(np.int16).tobytes() if first_audio > begin else b""
            )

        try:
            yield FrameChunk(no_codes, 0)
            while sent < len(frames):
                if sent - begin >= fails_after:
                    if isinstance(failure, float):
                        await asyncio.sleep(failure)
                        failure = None
                    if failure == "end":
                        return
                    if isinstance(failure, BaseException):
                        raise failure
                await asyncio.sleep(script.pace_s)
                taken, pcm = frames[sent : sent + script.size], audio(sent)
                readings = (Reading(sent, (sent / 2,)),) if script.has_readings else ()
                prompt = ClonePrompt(np.zeros(2, np.float32), frames[:2]) if request.reference and not sent else None
                sent, tokens = sent + len(taken), 3 + sent // 9
                reason = script.reason if sent == len(frames) and not request.gpu_frames else None
                yield FrameChunk(taken, tokens, reason, pcm, marks if pcm and request.marks else (), readings, prompt)
                marks = marks[:0] if pcm else marks
            if request.gpu_frames:
                yield FrameChunk(no_codes, 0, None, audio(len(frames)))
                await asyncio.sleep(script.pace_s)
                yield FrameChunk(no_codes, tokens, script.reason)
            sent = 999
        finally:
            if sent < 999:
                self.note(request, f"the talker's stream ends after frame {sent}")


class Gate(DecodeGate):
    """It tells of each task when its listener needs it."""

    async def submit(self, task: DecodeTask) -> Decoded:
        _, number, name, _ = task.codes[0]
        late = f"due in {task.deadline_s - time.monotonic():.3f} s, stalled {task.stalled_s:.3f} s, load {self.load}"
        POOL[0].notes[str(name)].append(f"    {'recalls' * task.state_only} {len(task.codes)} from {number}, {late}")
        return await super().submit(task)


POOL: list[Pool] = []
COST_S = [0.0]  # of a frame


class Response:
    """What a handle gives: the items of a generator on a replica, or one result."""

    def __init__(self, handle: "Handle", request: Any, start: Callable[[], Any], this: Any, fails: Any) -> None:
        self._handle, self._request = handle, request
        self._start, self._this, self._fails = start, this, fails

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        THIS.set(self._this)
        after, failure = self._fails
        await asyncio.sleep(0.001)
        if after < 0 and isinstance(failure, float):
            await asyncio.sleep(failure)
        elif after < 0:
            raise failure  # type: ignore[misc]
        try:
            started = self._start()
            async with aclosing(await started if asyncio.iscoroutine(started) else started) as items:
                count = 0
                async for item in items:
                    if count == after:
                        if isinstance(failure, float):
                            await asyncio.sleep(failure)
                        else:
                            raise failure  # type: ignore[misc]
                    count += 1
                    yield item
        except (InvalidRequest, Overloaded, EngineError, TalkerLost, CodecLost, Moved) as error:
            raise RayTaskError("method", "trace", error, proctitle="r", pid=1, ip="10.0.0.1") from error

    def __await__(self) -> Any:
        return self._start().__await__()

    def cancel(self) -> None:
        self._handle.pool.note(self._request, f"  the call of {self._handle.deployment_name} is cancelled")


class Handle:
    def __init__(
        self, pool: Pool, name: str, start: Callable[[str, Any], tuple[Callable[[], Any], SimpleNamespace, Any]]
    ) -> None:
        self.deployment_name, self.pool, self._start = name, pool, start

    def options(self, *, method_name: str, stream: bool = False) -> "Handle":
        return Handle(self.pool, self.deployment_name, lambda _, request: self._start(method_name, request))

    def remote(self, *arguments: Any) -> Response:
        request = arguments[0] if arguments else None
        return Response(self, request, *self._start("", request))


def talkers(pool: Pool) -> Handle:
    """Two talker replicas in turn."""
    replicas = [SimpleNamespace(name=f"Talker#{number}", _shutting_down=False) for number in (1, 2)]
    shells = []
    for each in replicas:
        THIS.set(each)
        shells.append(Replica(TalkerLost, lambda: None))
    THIS.set(None)
    turns = iter(range(10**6))

    def start(method: str, request: Any) -> Any:
        number = next(turns) % 2
        if method == "describe":

            async def describe() -> ModelInfo:
                pool.record(f"{pool.clock.now_s - 1000:.3f} a talker is described")
                return INFO

            return describe, replicas[number], (10**6, None)
        beat = FrameChunk(np.zeros((0, GROUPS), np.int16), 0)
        return (
            lambda: shells[number].with_heartbeats(pool.generate(request), beat, "from-engine"),
            replicas[number],
            (10**6, None),
        )

    return Handle(pool, "Talker", start)


def codecs(pool: Pool, config: CodecConfig, placements: dict[str, CodecPlacement]) -> Handle:
    """Two codec replicas in turn, with what Serve would say of them in its place."""
    models: dict[str, Any] = {name: talkers(pool) for name in placements or [""]}
    for number in (1, 2):
        this = SimpleNamespace(
            name=f"Codec#{number}",
            _shutting_down=False,
            _deployment_config=SimpleNamespace(max_ongoing_requests=256),
            deployment="Codec",
            replica_tag=str(number),
            app_name="talkray",
        )
        THIS.set(this)
        pool.codecs.append((this, CodecReplica("model", config, models, placements, 0.25)))
        THIS.set(None)
    turns = iter(range(10**6))

    def start(method: str, request: SynthesisRequest) -> Any:
        this, replica = pool.codecs[next(turns) % 2]
        failures = pool.scripts[request.request_id].codec_failures
        return lambda: replica.synthesize(request), this, failures.pop(0) if failures else (10**6, None)

    return Handle(pool, "Codec", start)


def told(chunk: PcmChunk) -> str:
    parts = [f"of {chunk.num_text_tokens} tokens", f"at {chunk.position}"]
    if len(chunk.codes):
        parts.insert(0, f"frames {chunk.codes[0, 1]}-{chunk.codes[-1, 1]}")
    if chunk.pcm:
        parts.append(f"audio {numbers(chunk.pcm)} ({chunk.num_samples})")
    if chunk.marks:
        parts.append("marks " + " ".join(f"{stage} {ns / 1e9 - 10000:.3f}" for stage, ns in chunk.marks))
    if chunk.trail:
        parts.append("trail " + " ".join(f"{stage} {ns / 1e9 - 10000:.3f}" for stage, ns in chunk.trail))
    if chunk.readings:
        parts.append(f"readings {' '.join(f'{each.first}:{each.chars[0]}' for each in chunk.readings)}")
    parts += ["clone prompt"] * (chunk.clone_prompt is not None) + [str(chunk.finish_reason)] * bool(
        chunk.finish_reason
    )
    return ", ".join(parts)


def drawn_script(draw: random.Random) -> Script:
    speech = [draw.randint(2, 30) for _ in range(draw.choice([0, 1, 2, 5, 13, 29, 45]))]
    codes = [SILENT] * draw.choice([0, 0, 2, 5]) + speech
    codes += draw.choice([[], [], [], [SILENT] * 110, [MURMUR] * 60, [4, 5, 6] * 45])
    if draw.random() < 0.06:
        codes.insert(draw.randint(0, len(codes)), BROKEN)
    reason = draw.choice([FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH, FinishReason.RUNAWAY])
    script = Script(codes or [9], reason, draw.choice([0.011, 0.05, 0.13]), draw.choice([1, 1, 4]))
    script.has_readings = draw.random() < 0.2
    for kept, kinds in (
        (
            script.failures,
            [
                TalkerLost("gone", 2),
                Moved("leaving"),
                TalkerLost("dead", 4),
                "end",
                "end",
                Overloaded("full", 2.5),
                3.7,
                draw.choice([EngineError("out of range"), InvalidRequest("bad", "voice")]),
            ],
        ),
        (
            script.codec_failures,
            [
                ActorDiedError(),
                CodecLost("broken", 5),
                4.5,
                asyncio.CancelledError(),
                BackPressureError(3, 2),
                DeploymentUnavailableError(DeploymentID("Codec")),
                Moved("leaving"),
            ],
        ),
    ):
        for _ in range(draw.choice([0, 0, 0, 1, 2, 4])):
            failure = draw.choice(kinds)  # type: ignore[arg-type]
            kept.append(
                (draw.choice([-1, 0, 2, 9]) if kept is script.codec_failures else draw.choice([0, 1, 3, 8]), failure)
            )
    return script


def drawn_request(draw: random.Random, name: str, models: Sequence[str]) -> SynthesisRequest:
    changes: dict[str, Any] = {"client": draw.choice(["ann", "bob", "囁き"]), "model": draw.choice(models)}
    changes["background"] = draw.random() < 0.15
    changes["leading_silence"] = draw.random() < 0.3
    changes["ignore_eos"] = draw.random() < 0.15
    changes["continues"] = draw.random() < 0.2
    if draw.random() < 0.5:
        changes["marks"] = (("ingress", time.time_ns()),)
    if draw.random() < 0.3:
        changes["reference"] = Reference(
            np.full(draw.choice([900, 1300]), 0.5, np.float32), "Said.", x_vector_only=draw.random() < 0.3
        )
    return SynthesisRequest(name, "Hello.", **changes)


async def listen(pool: Pool, request: SynthesisRequest, stream: Any, *, patience: tuple[int, float, bool]) -> None:
    """Read a stream. After some items the reader pauses, or leaves."""
    pauses_at, pause_s, leaves = patience
    note, count = pool.note, 0
    try:
        async with aclosing(with_failover(stream)) as chunks:
            async for chunk in chunks:
                note(request, told(chunk))
                count += 1
                if count == pauses_at:
                    if leaves:
                        note(request, "the reader leaves")
                        return
                    await asyncio.sleep(pause_s)
        note(request, "over")
    except Exception as error:
        note(
            request,
            f"failed: {type(error).__name__}: {error}"
            + "".join(
                f", {name} {getattr(error, name):.3g}" for name in ("beside", "retry_after_s") if hasattr(error, name)
            ),
        )


async def scenario(pool: Pool, config: CodecConfig, placements: dict[str, CodecPlacement], streams: int) -> None:
    handle, direct = codecs(pool, config, placements), talkers(pool)
    draw, record = pool.draw, pool.record
    for this, replica in pool.codecs:
        THIS.set(this)
        await replica.check_health()
    THIS.set(None)
    readers = []
    for number in range(streams):
        await asyncio.sleep(draw.choice([0.0, 0.02, 0.07, 0.05 if config.placement == "pool" else 0.6]))
        request = drawn_request(draw, str(number), [*placements] or [""])
        pool.scripts[request.request_id] = script = drawn_script(draw)
        names = "background", "leading_silence", "ignore_eos", "continues", "reference"
        flags = " ".join([*(name for name in names if getattr(request, name)), request.client, request.model])
        frames = f"{len(script.codes)} frames, {script.reason}, {script.pace_s} s each, {script.size} at once"
        pool.notes[request.request_id] = [f"stream {number}: {frames}; {flags}"]
        pool.notes[request.request_id] += [f"  fails {shown(each)}" for each in script.failures + script.codec_failures]
        if draw.random() < 0.15:
            script.codec_failures.clear()
            stream: Any = TalkerAudio(
                request, lambda r: stream_from_replica(direct, "generate", r, lost=TalkerLost), INFO
            )  # type: ignore[arg-type]
        else:
            stream = CodecAudio(
                request,
                lambda r: stream_from_replica(handle, "synthesize", r, lost=CodecLost),
                INFO,
                each_chunk=lambda chunk: None,
            )  # type: ignore[arg-type]
        patience = (draw.choice([1, 2, 5, 99]), draw.choice([0.5, 9.0, 11.0, 25.0]), draw.random() < 0.2)
        readers.append(asyncio.create_task(listen(pool, request, stream, patience=patience)))
        if draw.random() < 0.1:
            asyncio.get_running_loop().call_later(draw.choice([0.0, 0.004, 0.8]), readers[-1].cancel)
        if number % 5 == 4:
            for this, replica in pool.codecs:
                record(f"{pool.clock.now_s - 1000:.3f} {this.name}", replica.record_autoscaling_stats())
        if number == streams // 2:
            pool.codecs[0][0]._shutting_down = True
            pool.replica_states.update(RUNNING=0, STOPPING=1)
        if number == streams * 3 // 4:
            pool.replica_states["RUNNING"] = 1
    await asyncio.gather(*readers, return_exceptions=True)
    for this, replica in pool.codecs:
        THIS.set(this)
        record(
            f"{pool.clock.now_s - 1000:.3f} {this.name} forgets",
            await replica.forget((b"unknown",)),
            **replica.record_autoscaling_stats(),
        )
    await asyncio.sleep(5)


def as_metrics(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """What each series gets, by name and tags."""
    series: dict[str, list[float]] = {}
    for instrument in metrics.INSTRUMENTS:
        monkeypatch.setattr(
            instrument,
            "record",
            lambda value, name=instrument.name, **tags: series.setdefault(f"{name} {shown(tags)}", []).append(value),
        )
    return series


@pytest.mark.parametrize(("name", "cost_s", "config", "placements"), [
    ("hybrid", 0.016, {"workers": 1}, {}), ("crowd", 0.008, {"workers": 1, "placement": "pool"}, {}),
    ("models", 0.016, {"workers": 5, "placement": "pool"}, {"small": "pool", "large": "hybrid"}),
])  # fmt: skip
def test_a_pool_of_codecs(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    cost_s: float,
    config: dict[str, Any],
    placements: dict[str, CodecPlacement],
) -> None:
    record, draw, clock = Record(), random.Random(name), virtual_clock(monkeypatch)
    pool, COST_S[0] = Pool(record, clock, draw), cost_s

    def context() -> SimpleNamespace:
        if (this := THIS.get()) is None:
            raise RayServeException("not in a replica")
        return this

    status = SimpleNamespace(
        applications={
            "talkray": SimpleNamespace(deployments={"Codec": SimpleNamespace(replica_states=pool.replica_states)})
        }
    )
    monkeypatch.setattr(handles, "_finished", defaultdict(Rate))
    monkeypatch.setattr(serve, "get_replica_context", context)
    monkeypatch.setattr(serve, "status", lambda: status)
    monkeypatch.setattr(ray_private, "this_replica", THIS.get)
    monkeypatch.setattr(ray_private, "replica_name", lambda: THIS.get().name)  # type: ignore[union-attr]
    monkeypatch.setattr(
        ray_private, "pools", lambda app: record("pools of", app) or {"Talker": ray_private.Pool(1, ())}
    )
    monkeypatch.setattr(ray_metrics, "install", record.fake("install"))
    monkeypatch.setattr("deployments.serving.replica.freeze_loaded", record.fake("freeze_loaded"))
    monkeypatch.setattr(os, "_exit", record.fake("exit"))
    warm = WarmUpResult({1: 4, 2: 8, 3: 4, 4: 4, 8: 2, 12: 1}, 0.005)
    shape = SimpleNamespace(frame_samples=SAMPLES, sample_rate=RATE, frame_s=SAMPLES / RATE)

    def load(model: str, config: CodecConfig) -> Codec:
        return Codec(Path(model), shape, cache(partial(Decoder, record, draw)), Encoder(), warm)  # type: ignore[arg-type]

    monkeypatch.setattr(service, "load_codec", load)
    monkeypatch.setattr(service, "DecodeGate", Gate)
    series = as_metrics(monkeypatch)
    with record.logs("deployments"):
        run_virtual(clock, scenario(pool, CodecConfig(device="cuda", **config), placements, 34))
    for notes in pool.notes.values():
        record.lines += notes
    with closing(asyncio.new_event_loop()) as loop:  # queues of `serve.batch` ask for one when they are collected
        asyncio.set_event_loop(loop)
        pool.codecs.clear()
        gc.collect()
        asyncio.set_event_loop(None)
    for series_name, values in sorted(series.items()):
        record(f"{series_name}: {len(values)} values, {sum(values):.4f} in all,", min(values), max(values))
    record.check(f"pool-{name}")
