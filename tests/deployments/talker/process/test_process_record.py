"""Both ends of the socket between a talker replica and its engine process, on a virtual clock: what each one sends."""

import asyncio
import os
import random
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray import serve

from deployments.config import TalkerConfig
from deployments.errors import EngineError, InvalidRequest, NotReady, Overloaded, TalkerLost
from deployments.gpu import asleep
from deployments.protocol import FinishReason, FrameChunk, Mailbox, ModelInfo, ModelKind, Reference, SynthesisRequest
from deployments.recording_cache import Lookups
from deployments.serving import metrics, ray_metrics, ray_private
from deployments.serving.reports import Start
from deployments.talker.deployment import TalkerReplica
from deployments.talker.engine.engine import StepOutput
from deployments.talker.process import channel, engine_client, engine_process
from tests.clock import Clock
from tests.records import Record, shown
from tests.virtual_time import run_virtual, virtual_clock

INFO = ModelInfo("tiny", ModelKind.CUSTOM_VOICE, ("ann",), (), True, 300, 24, 2, codec_precision="float16")
NO_CODES = np.zeros((0, 2), np.int16)


def frames(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int16)[:, None].repeat(2, 1)


def told(chunk: FrameChunk) -> str:
    marks = " ".join(f"{stage} {ns / 1e9 - 10000:.3f}" for stage, ns in chunk.marks)
    return f"frames {chunk.codes[:, 0].tolist()} {len(chunk.pcm)} bytes {marks} {chunk.finish_reason or ''}".rstrip()


class Process:
    """What `Popen` gives, and the engine behind it, which follows a script for each request."""

    events: tuple[Any, ...] = (channel.Loading("looking"), channel.Loading("networks: plain"), channel.Ready(INFO))

    def __init__(
        self, record: Record, clock: Clock, draw: random.Random, command: list[str], descriptors: list[int]
    ) -> None:
        self.record, self.clock, self.draw, self.pid, self.code = record, clock, draw, 4321, None
        record(
            "start", command[3].replace(str(descriptors[0]), "N"), channel.EngineStart.model_validate_json(command[-1])
        )
        self.socket = socket.socket(fileno=os.dup(descriptors[0]))
        for event in self.events:
            self.socket.sendall(channel.encode(event))
        self.is_silent, self.speaking, self.steps = False, dict[int, asyncio.Task[None]](), 0

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.record(f"{self.clock.now_s - 1000:.3f} killed")
        self.code = -9
        if not self.is_silent:  # a process that hangs in a driver keeps its socket
            self.writer.close()

    def wait(self, timeout_s: float | None = None) -> int:
        return self.code or 0

    async def serve(self) -> None:
        reader, self.writer = await asyncio.open_unix_connection(sock=self.socket)
        beats = asyncio.create_task(self.beat())
        unpacker = channel.Unpacker()
        while data := await reader.read(99):
            for command in unpacker.feed(data):
                self.handle(command)
        self.record(f"{self.clock.now_s - 1000:.3f} the engine's socket is closed")
        beats.cancel()
        for task in self.speaking.values():
            task.cancel()

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            self.send(channel.Heartbeat())

    def handle(self, command: Any) -> None:
        if isinstance(command, channel.Submit):
            request = command.request
            self.record(
                f"{self.clock.now_s - 1000:.3f} engine: submit {command.sequence_id} {request.text}", *request.marks
            )
            self.speaking[command.sequence_id] = asyncio.create_task(self.speak(command.sequence_id, request))
            return
        self.record(f"{self.clock.now_s - 1000:.3f} engine:", command)
        if isinstance(command, channel.Abort):
            self.speaking[command.sequence_id].cancel()
        elif isinstance(command, channel.Forget):
            self.send(channel.HasForgotten(len(command.voices) + 4))

    def send(self, event: channel.EngineEvent) -> None:
        if not self.is_silent:
            self.writer.write(channel.encode(event))

    async def speak(self, number: int, request: SynthesisRequest) -> None:
        draw = self.draw
        fails_at = draw.choice([99, 99, 99, 0, 3])
        made, total = 0, draw.choice([1, 7, 26])
        while True:
            await asyncio.sleep(draw.choice([0.02, 0.02, 0.7]))
            self.steps += 1
            load = channel.EngineLoad(
                len(self.speaking),
                self.steps % 5,
                self.steps / 1000,
                Lookups(self.steps % 3, 1),
                Lookups(2, self.steps % 4),
                self.steps % 2,
                self.steps // 10,
            )
            if made >= fails_at:
                self.send(
                    channel.RequestFailed(
                        number,
                        draw.choice(
                            [Overloaded("full", 3.5), InvalidRequest("bad", "voice"), EngineError("out of range")]
                        ),
                    )
                )
                return
            count = min(draw.choice([0, 1, 2, 4]), total - made)
            reason = FinishReason.STOP if made + count == total else None
            chunk = FrameChunk(
                frames(made, count), 3, reason, bytes(count), (("codes", time.time_ns()),) if request.marks else ()
            )
            made += count
            self.send(channel.Produced(((number, chunk), (number + 1000, chunk)), 0.01 * self.steps, load))
            if reason:
                return


async def replica_scenario(
    record: Record, clock: Clock, draw: random.Random, started: list[Process], keep_alive_s: float | None
) -> None:
    replica = TalkerReplica("tiny", TalkerConfig(keep_alive_s=keep_alive_s, device="cuda"), "name", makes_audio=True)
    process = started[-1]
    serving = asyncio.create_task(process.serve())
    notes: dict[int, list[str]] = {}

    async def listen(number: int, request: SynthesisRequest, leaves_at: int, waits_s: float) -> None:
        notes[number] = [
            f"stream {number}: {request.text} background={request.background} live={request.mailbox is not None}"
        ]
        try:
            async with aclosing(await replica.generate(request)) as chunks:
                count = 0
                async for chunk in chunks:
                    notes[number].append(f"  {clock.now_s - 1000:.3f} {told(chunk)}")
                    count += 1
                    if count == leaves_at:
                        notes[number].append("  leaves")
                        return
                    await asyncio.sleep(waits_s)
        except Exception as error:
            notes[number].append(f"  {clock.now_s - 1000:.3f} failed: {shown(error)} {getattr(error, 'beside', '')}")

    readers = []
    for number in range(34):
        await asyncio.sleep(draw.choice([0.0, 0.05, 0.4, 3.1]))
        mailed = Mailbox("host", number, "token") if draw.random() < 0.3 else None
        marks = (("ingress", time.time_ns()),) if draw.random() < 0.5 else ()
        request = SynthesisRequest(
            f"r{number}", f"text {number}", mailbox=mailed, background=draw.random() < 0.25, marks=marks
        )
        readers.append(
            asyncio.create_task(listen(number, request, draw.choice([2, 5, 99, 99]), draw.choice([0.0, 0.0, 0.3])))
        )
        if number % 4 == 3:
            await record.attempt_async("health", replica.check_health())
            record(f"{clock.now_s - 1000:.3f}", replica.record_autoscaling_stats(), await replica.describe() == INFO)
        if number % 7 == 5:
            both = asyncio.gather(replica.forget((b"a",)), replica.forget((b"b", b"c")), return_exceptions=True)
            await record.attempt_async("forget", both)
        if number == 14:
            await asyncio.sleep(6)
        if number == 25:
            process.is_silent = True
        if number == 27 and keep_alive_s is None:
            readers[0].cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await asyncio.sleep(13)
    await record.attempt_async("health", replica.check_health())
    await record.attempt_async("forget", replica.forget((b"z",)))
    for lines in notes.values():
        record.lines += lines
    replica.__del__()
    await asyncio.sleep(0.3)
    process.writer.close()
    await serving


@pytest.mark.parametrize(("keep_alive_s", "is_busy"), [(None, False), (1.5, True), (0.6, False)])
def test_a_talker_replica(monkeypatch: pytest.MonkeyPatch, keep_alive_s: float | None, is_busy: bool) -> None:
    """With 0.6 s, its GPU cannot be left the second time."""
    record, draw, clock = Record(), random.Random(8), virtual_clock(monkeypatch)
    started: list[Process] = []

    async def read(mailed: Mailbox) -> AsyncGenerator[str, None]:
        for part in ("one ", "囁き ", "three")[: mailed.port % 4]:
            await asyncio.sleep(0.09)
            yield part
        if mailed.port % 3 == 0:
            raise TalkerLost(f"the text cannot be read from {mailed.host}")

    def popen(command: list[str], pass_fds: list[int]) -> Process:
        started.append(Process(record, clock, draw, command, pass_fds))
        return started[-1]

    wakes, sleeps = iter(range(99)), iter(range(99))

    def send_to_sleep(pid: int) -> None:
        record(f"  {clock.now_s - 1000:.3f} send to sleep", pid)
        if next(sleeps) == 1 and keep_alive_s == 0.6:
            raise EngineError("an old driver")

    def wake(pid: int) -> None:
        record(f"  {clock.now_s - 1000:.3f} wake", pid)
        if next(wakes) == 5:
            raise EngineError("others use the memory")

    monkeypatch.setattr(engine_client.subprocess, "Popen", popen)
    monkeypatch.setattr(engine_client.mailbox, "read", read)
    monkeypatch.setattr(engine_client, "any_runnable", lambda pid: is_busy)
    monkeypatch.setattr(ray_metrics, "install", record.fake("install"))
    monkeypatch.setattr(asleep, "send_to_sleep", send_to_sleep)
    monkeypatch.setattr(asleep, "wake", wake)
    context = SimpleNamespace(app_name="talkray", deployment="Talker", replica_tag="1")
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(ray_private, "this_replica", lambda: SimpleNamespace(_shutting_down=False))
    monkeypatch.setattr(ray_private, "put_note", lambda key, note: record(f"  note {key}: {note.decode()}"))
    last = Start(400.0, took_s=77.0).note() if is_busy else None
    monkeypatch.setattr(ray_private, "get_note", record.fake("last note", lambda key: last))
    monkeypatch.setattr("deployments.serving.replica.freeze_loaded", record.fake("freeze"))
    monkeypatch.setattr(os, "_exit", record.fake("exit"))
    series: dict[str, list[float]] = {}
    for instrument in metrics.INSTRUMENTS:
        kept = lambda value, name=instrument.name, **tags: series.setdefault(f"{name} {shown(tags)}", []).append(value)  # noqa: E731
        monkeypatch.setattr(instrument, "record", kept)
    with record.logs("deployments"):
        run_virtual(clock, replica_scenario(record, clock, draw, started, keep_alive_s))
    monkeypatch.setattr(Process, "events", (channel.RequestFailed(None, NotReady("no room")),))
    record.attempt("start", lambda: TalkerReplica("tiny", TalkerConfig(), "name", makes_audio=False))
    started[-1].socket.close()
    for name, values in sorted(series.items()):
        record(f"{name}: {len(values)} values, {sum(values):.4f} in all", values[:3])
    record.check(f"talker-replica-{keep_alive_s}")


class Connection:
    """The engine process's end of the socket: `arriving` by time, and room for some bytes at a time."""

    def __init__(self, record: Record, clock: Clock) -> None:
        self.record, self.clock, self.arriving, self.room = record, clock, list[tuple[float, bytes]](), 10**9
        self.unpacker = channel.Unpacker()

    def is_readable(self) -> bool:
        return self.clock.now_s >= self.arriving[0][0]

    def recv(self, most: int) -> bytes:
        return self.arriving.pop(0)[1]

    def send(self, data: bytearray, flags: int = 0) -> int:
        if not self.room:
            raise BlockingIOError
        taken, self.room = min(len(data), self.room), self.room - min(len(data), self.room)
        self._told(bytes(data[:taken]))
        return taken

    def sendall(self, data: bytearray) -> None:
        self.record("  all at once", len(data))
        self._told(bytes(data))

    def _told(self, data: bytes) -> None:
        for event in self.unpacker.feed(data):
            if isinstance(event, channel.Produced):
                chunks = "; ".join(f"{number}: {told(chunk)}" for number, chunk in event.chunks)
                self.record(
                    f"  {self.clock.now_s - 1000:.4f} sent {event.step_s:.4f} s, {chunks or 'no chunks'}", event.load
                )
            else:
                self.record(f"  {self.clock.now_s - 1000:.4f} sent", event)


class FakeEngine:
    """It makes a frame a step for each request, and fails as their texts say."""

    def __init__(self, record: Record, clock: Clock) -> None:
        self.record, self.clock, self.running = record, clock, dict[int, list[Any]]()
        self.info, self.poll_timeout_s = INFO, 0.0
        self.scheduler: Any = SimpleNamespace(
            waiting=[], kv_used_ratio=0.25, num_background=3, blocks=SimpleNamespace(capacity=5000), num_listeners=2
        )
        lookups = iter(range(99))
        self.prompts: Any = SimpleNamespace(
            speakers=SimpleNamespace(take_lookups=lambda: Lookups(next(lookups), 1)),
            references=SimpleNamespace(take_lookups=lambda: Lookups(2, 3)), start_encoding=self.start_encoding,
            encoded=self.encoded, tokenizer=SimpleNamespace(encode_ahead=record.fake("encode ahead")),
        )  # fmt: skip
        self.input_processor: Any = SimpleNamespace(
            long_texts=lambda request: [request.text] if "long" in request.text else []
        )
        self.runner: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), networks=SimpleNamespace(name="fused"))
        self.audio = SimpleNamespace(repaired=6)
        self.failures: list[tuple[int, Exception]] = []

    @property
    def is_idle(self) -> bool:
        return not self.running

    def start_encoding(self, request: SynthesisRequest) -> Any:
        if request.reference is None:
            return None
        if "short" in request.text:
            raise InvalidRequest("ref_audio is too short", "ref_audio")
        ready_s, clock = self.clock.now_s + 0.05, self.clock
        return type("Encoding", (), {"is_done": property(lambda self: clock.now_s >= ready_s)})()

    def encoded(self, request: SynthesisRequest, encoding: object) -> SynthesisRequest:
        return replace(request, text=f"{request.text} (encoded)")

    def check_room(self, request: SynthesisRequest) -> None:
        if "full" in request.text:
            raise Overloaded("full", 7.0)

    def add(self, number: int, request: SynthesisRequest) -> None:
        self.record(
            f"  {self.clock.now_s - 1000:.4f} add {number} {request.text}", *(stage for stage, _ in request.marks)
        )
        self.clock.now_s += 0.002
        self.check_room(request)
        if "broken" in request.text:
            raise ValueError("a mistake")
        self.start_encoding(request)
        self.running[number] = [request, 0]

    def append_text(self, number: int, text: str, *, is_last: bool) -> None:
        self.record(f"  append {number} {text!r}", is_last)
        if not text and not is_last:
            raise InvalidRequest("input has no text", "input")

    def abort(self, number: int) -> None:
        self.record(f"  abort {number}")
        self.running.pop(number, None)

    def forget(self, voices: tuple[bytes, ...]) -> int:
        return len(voices) * 5

    def check_integrity(self) -> None:
        self.record("  integrity")

    def step(self, meanwhile: Any) -> StepOutput:
        self.clock.now_s += 0.013
        meanwhile()
        chunks, failures = [], []
        for number, (request, made) in list(self.running.items()):
            self.running[number][1] += 1
            if "dies" in request.text and made == 2:
                failures.append((number, TalkerLost("not finite")))
                del self.running[number]
                continue
            last = FinishReason.LENGTH if made == 4 else None
            pcm = bytes(2) if request.gpu_frames and made in (2, 3) else b""
            chunks.append((number, FrameChunk(frames(made, made != 1), 3, last, pcm)))
            if last:
                del self.running[number]
        return StepOutput(tuple(chunks), tuple(failures))


def test_an_engine_process(monkeypatch: pytest.MonkeyPatch) -> None:
    record, draw, clock = Record(), random.Random(9), virtual_clock(monkeypatch)
    connection, engine = Connection(record, clock), FakeEngine(record, clock)
    submitted = [
        "",
        "long",
        "full",
        "broken",
        "short",
        "dies",
        "marks",
        "marks long",
        "gpu",
        "marks gpu",
        "marks dies",
        "",
    ]
    now_s = clock.now_s + 0.1
    for number in range(40):
        text = draw.choice(submitted)
        reference = Reference(np.zeros(9, np.float32)) if draw.random() < 0.3 else None
        marks = (("ingress", 10_000_500_000_000),) if "marks" in text else ()
        commands: list[channel.Command] = [
            channel.Submit(
                number,
                SynthesisRequest(
                    f"r{number}", f"{number} {text}", reference=reference, marks=marks, gpu_frames=9 * ("gpu" in text)
                ),
            )
        ]
        commands += [
            channel.Append(number - draw.randint(0, 2), draw.choice(["more", "", "囁き"]), draw.random() < 0.3)
        ] * (draw.random() < 0.5)
        commands += [channel.Abort(number - draw.randint(0, 3))] * (draw.random() < 0.3)
        commands += [channel.Forget((b"a", b"b"))] * (draw.random() < 0.1)
        data = b"".join(map(channel.encode, commands))
        cut = draw.choice([len(data), len(data) // 2, 3])
        connection.arriving += [(now_s, data[:cut]), (now_s + draw.choice([0.0, 0.002, 0.3]), data[cut:])][
            : 1 + (cut < len(data))
        ]
        now_s = connection.arriving[-1][0] + draw.choice([0.0, 0.02, 0.05, 0.4])
    connection.arriving.append((now_s + 2, b""))

    def select(
        reading: list[Any], writing: list[Any], failing: list[Any], timeout_s: float | None
    ) -> tuple[Any, Any, Any]:
        if writing and draw.random() < 0.3:
            connection.room = draw.choice([50, 10**9])
            return ([connection] if connection.is_readable() else []), writing, []
        if connection.is_readable():
            connection.room = draw.choice([0, 10**9, 10**9, 10**9])
            return reading, [], []
        clock.now_s = min(
            clock.now_s + (9.0 if timeout_s is None else timeout_s), max(clock.now_s, connection.arriving[0][0])
        )
        return ([connection] if connection.is_readable() else []), [], []

    class Pool:
        """Texts that are tokenized ahead take 30 ms."""

        def __init__(self, *_: object) -> None:
            pass

        def submit(self, call: Any, *arguments: Any) -> Any:
            call(*arguments)
            done_s = clock.now_s + 0.03
            return SimpleNamespace(done=lambda: clock.now_s >= done_s, cancel=record.fake("cancel"))

    def load(directory: Path, config: TalkerConfig, start_clock: Any, *, makes_audio: bool) -> FakeEngine:
        record("load", directory, config.max_num_seqs, makes_audio)
        with start_clock.phase("loading"):
            clock.now_s += 3.5
            with start_clock.phase("within it"), start_clock.phase("further within"):
                clock.now_s += 0.25
        return engine

    monkeypatch.setattr(engine_process.select, "select", select)
    monkeypatch.setattr(engine_process, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(
        engine_process, "locate", lambda model, report: report("downloading") or Path("/models") / model
    )
    monkeypatch.setattr(engine_process, "load_engine", load)
    monkeypatch.setattr(engine_process, "freeze_loaded", record.fake("freeze"))
    monkeypatch.setattr(engine_process, "_MOST_UNSENT_BYTES", 1000)  # a replica that reads nothing for a while
    start = channel.EngineStart(model="tiny", config=TalkerConfig(max_num_seqs=3), makes_audio=False)
    with record.logs("deployments"):
        record.attempt("run", lambda: engine_process.EngineProcess(connection).run(start))  # type: ignore[arg-type]
        for error in (NotReady("no"), OSError("no disk")):

            def fail(*_: object, error: Exception = error, **__: object) -> None:
                raise error

            monkeypatch.setattr(engine_process, "load_engine", fail)
            record.attempt("run", lambda: engine_process.EngineProcess(connection).run(start))  # type: ignore[arg-type]
    record.check("engine-process")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_watchdog(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Its thread looks every quarter of a second at steps of each length, within others, busy and idle."""
    record, draw, clock = Record(), random.Random(10), virtual_clock(monkeypatch)
    idle_s, looks = 0.0, iter(range(120))

    class Event:
        set = record.fake("ended")

        def wait(self, seconds: float) -> bool:
            nonlocal idle_s
            clock.now_s += seconds * draw.choice([1, 1, 1, 3])
            idle_s = draw.choice([0.0, 0.0, idle_s + seconds, 5.0])
            if draw.random() < 0.25:
                act()
            return next(looks, None) is None

    monkeypatch.setattr(engine_process.threading, "Event", Event)
    monkeypatch.setattr(engine_process, "ThreadWork", lambda: SimpleNamespace(idle_s=lambda now_s: idle_s))
    watchdog = engine_process.Watchdog(
        device, lambda: record(f"{clock.now_s - 1000:.2f} alive"), give_up=record.fake("give up")
    )
    open_steps: list[Any] = []

    def act() -> None:
        if open_steps and draw.random() < 0.5:
            open_steps.pop().__exit__(None, None, None)
            record(f"{clock.now_s - 1000:.2f} a step ends, {len(open_steps)} around it")
        elif len(open_steps) < 2:
            open_steps.append(watchdog.step())
            open_steps[-1].__enter__()
            record(f"{clock.now_s - 1000:.2f} a step within {len(open_steps) - 1} begins")

    thread = type(
        "Thread",
        (),
        {
            "__init__": lambda self, target, **options: setattr(self, "target", target) or record("thread", **options),
            "start": lambda self: self.target(),
            "join": record.fake("join"),
        },
    )
    monkeypatch.setattr(engine_process.threading, "Thread", thread)
    with record.logs("deployments"), watchdog.running():
        record("running")
    record.check(f"watchdog-{device}")
