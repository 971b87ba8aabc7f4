"""Values that cross processes, limits, caches and listeners: seeded walks through all of their methods."""

import asyncio
import pickle
import random
import struct
from collections import OrderedDict
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments import config, errors, protocol
from deployments.autoscaling_records import CodecRecord, TalkerRecord
from deployments.codec.plan import ChunkPlan, recall_sizes
from deployments.codec.pool.ramps import chosen_ramp, fitted_ramp
from deployments.limits import Rate, StreamLimit
from deployments.listener import Listener, ReaderTimeout
from deployments.protocol import FinishReason, FrameChunk, Mailbox, PcmChunk, Reading, Reference, SynthesisRequest, Tail
from deployments.recording_cache import RecordingCache
from deployments.serving import mailbox, metrics, ray_metrics
from deployments.serving.failover import Attempts
from deployments.serving.reports import Start, start_key
from deployments.speech_detection import EndingGuard, FirstSound, LeadingSilence, runaway_frames
from tests.records import Record
from tests.virtual_time import run_virtual, virtual_clock

RUN = ray_metrics.Recorder.run  # which no other test calls


def test_limits_and_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    record, draw, now_s = Record(), random.Random(1), 50.0
    for lateness, least in (((0.02, 0.35, 0.02, 0.0), 2), ((0.5, 0.04, 0.0, 0.0), 1), ((0.0, 0.1, 0.12, 0.05), 3)):
        rate, limit, running = Rate(), StreamLimit(least=least), 0
        for step in range(240):
            now_s += draw.choice([0.01, 0.13, 0.4])
            if draw.random() < 0.45:
                running -= running > 0
                rate.count(now_s)
            elif room := limit.has_room(running):
                running += room
            else:
                record(f"{now_s:.2f} no room for {running + 1}")
            limit.count_chunk(late=draw.random() < lateness[step // 60], streams=running, now_s=now_s)
            rates = rate.per_second(now_s), rate.retry_after_s(running, now_s)
            record(f"{now_s:.2f} {running} streams", limit.streams, *rates)
        record(
            "much later", rate.per_second(now_s + 19), rate.retry_after_s(3, now_s + 21), rate.per_second(now_s + 21)
        )
    cache: RecordingCache[bytes] = RecordingCache(max_bytes=100, size=len)
    for step in range(220):
        key = draw.choice([b"voice-of-ann-000", b"voice-of-bob-000", b"voice-of-eve-000"]) + draw.choice(
            [b"", b"1", b"2"]
        )
        what, size = (
            draw.choice(["get", "get", "put", "find", "find", "forget", "lookups"]),
            draw.choice([20, 20, 30, 50, 100, 101]),
        )
        if what == "get":
            record(f"get {key!r}", len(cache.get(key, lambda size=size: bytes(size))))  # type: ignore[misc]
        elif what == "put":
            cache.put(key, bytes(size))
            record(f"put {key!r}", size)
        elif what == "find":
            record(f"find {key!r}", len(cache.find(key) or b""))
        elif what == "lookups":
            record("lookups", cache.take_lookups())
        elif draw.random() < 0.4 or step > 190:
            record(f"forget {key[:16]!r}", cache.forget((key[:16], b"unknown")))
            cache = cache if step > 200 else RecordingCache(max_bytes=100 + step // 20 * 10, size=len)
    cache = RecordingCache(max_bytes=100, size=len)
    for number in range(9):  # each voice is forgotten when the next one has come
        cache.put(b"%016d" % number, bytes(40))
        left = cache.forget([b"%016d" % (number - 1)])
        record(f"forgotten {left}, found", [each for each in range(9) if cache.find(b"%016d" % each)])
    record.check("limits")


def test_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams whose replicas refuse, die, leave and go on, until they end or are given up."""
    record, draw, clock = Record(), random.Random(7), virtual_clock(monkeypatch)
    beat, no_codes = FrameChunk(np.zeros((0, 2), np.int16), 0), np.zeros((0, 2), np.int16)
    frame, last = replace(beat, codes=np.zeros((1, 2), np.int16)), FrameChunk(no_codes, 0, FinishReason.STOP)
    lost, kinds = (
        errors.CodecLost("gone", 3),
        (errors.TalkerLost("beyond", 2), errors.NotReady("no"), errors.Overloaded("full")),
    )
    for each in (metrics.FAILOVERS, metrics.FAILOVER_GAP):
        monkeypatch.setattr(each, "record", record.fake(each.name))
    with record.logs("deployments"):
        for number in range(60):
            goes_on, most = draw.choice([0.0, 0.3, 0.9]), draw.choice([12, 12, 1])
            attempts, none_left = Attempts(errors.CodecLost, f"r{number}", most_losses=most), False
            record(f"-- {number} of {most} losses, goes on {goes_on}")
            try:
                while not attempts.has_ended and clock.now_s < 9000:
                    clock.now_s += draw.choice([0.01, 0.5, 4.0])
                    for chunk in draw.choices(
                        [beat, frame, last], [3, 8 * goes_on, goes_on / 3], k=draw.choice([0, 1, 2])
                    ):
                        attempts.record_progress(chunk)
                        trail = tuple((name, ns / 1e9 - 10000) for name, ns in attempts.with_losses(chunk).trail)
                        record(f"  {clock.now_s - 1000:.2f} {len(chunk.codes)} frames", attempts.has_ended, *trail)
                    if draw.random() < 0.1:
                        attempts.resume()
                    error = (
                        kinds[1]
                        if none_left
                        else draw.choice([lost, lost, lost, errors.Moved("leaving"), draw.choice(kinds)])
                    )
                    delay_s = attempts.delay_after(error)
                    none_left = number % 6 == 5 and not goes_on
                    record(f"  {clock.now_s - 1000:.2f} again after", error, delay_s)
            except errors.TalkrayError as error:
                record(f"  {clock.now_s - 1000:.2f} !", error, getattr(error, "beside", None))
    record.check("attempts")


def test_sounds_and_endings() -> None:
    record, draw = Record(), random.Random(2)
    noise = np.where(np.arange(240) % 2, 1, -1)
    for number in range(330):
        guard = EndingGuard(240, 3000, position=draw.choice([0, 0, 0, 240, 700]))
        silence, sound, frames = LeadingSilence(3000), FirstSound(3000), 0
        levels = [
            [0] * draw.choice([0, 3, 30, 131]),
            [9000] * draw.choice([0, 2, 40]),
            draw.choice([[0] * draw.choice([9, 110]), [150] * 130, [400, 420] * 60, [9000] * 190]),
        ]
        loop, tokens = draw.choice([0, 3, 7, 40, 41]), draw.choice([0, 2, 5, 60])
        codes = [draw.randint(2, 2000) for _ in range(draw.choice([2, 40]))]
        level = [each for part in levels for each in part] or [0]
        reason, trimmed = None, 0
        while reason is None and frames < len(level):
            count = draw.choice([1, 2, 5])
            of_chunk = level[frames : frames + count]
            now = [
                (frames + i) % loop if loop else codes[(frames + i) % len(codes)] + frames for i in range(len(of_chunk))
            ]
            pcm = np.concatenate([noise * each for each in of_chunk]).astype(np.int16)[draw.choice([0, 0, 0, 17]) :]
            frames += len(of_chunk)
            last = draw.choice([FinishReason.STOP, FinishReason.LENGTH]) if frames == len(level) else None
            rows = np.array(now, np.int16)[:, None].repeat(2, 1)[draw.choice([0, 0, 0, 1]) :]
            kept, speech, reason = guard.truncate(rows, pcm, last, tokens)
            trimmed += len(pcm) - len(silence.trim(pcm))
            if (onset := sound.feed(pcm)) is not None:
                record(f"{number}: first sound at {onset:.4f} s")
            if reason is not None:
                sizes = f"{len(kept)} frames, {len(speech)} of {len(pcm)} samples, {trimmed} trimmed"
                record(f"{number}: {tokens} tokens, {frames} frames: kept {sizes}, {reason}")
    record("runaway", [runaway_frames(tokens, 0.08) for tokens in (0, 1, 6, 7, 40, 1000)])
    record.check("endings")


def walk_of_plan(record: Record, draw: random.Random, ramp: tuple[int, ...], **options: float) -> None:
    plan, available = ChunkPlan(ramp, frame_s=0.08, **options), 0
    for _ in range(30):
        available += draw.choice([0, 1, 1, 3, 9])
        lead_s, load, ended = (
            draw.choice([-0.4, 0.05, 0.25, 0.3, 0.9, 2.0]),
            draw.choice([0, 0, 1, 3]),
            draw.random() < 0.15,
        )
        what = draw.random()
        if what < 0.08:
            plan.restart()
        elif what < 0.15:
            plan.skip(draw.choice([1, 3, 9]))
        facts = plan.lead_to_decode_s(available), plan.patience_s(lead_s)
        size = plan.next_size(available, ended=ended, lead_s=lead_s, load=load)
        record(f"plan {ramp} {available} there, lead {lead_s}, load {load}{', ended' * ended}: {size}", *facts)
        available = max(0, available - size)


def test_plans_and_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    record, draw, clock = Record(), random.Random(3), virtual_clock(monkeypatch)
    for workers in (1, 3, 4, 9):
        walk_of_plan(record, draw, chosen_ramp(workers))
        walk_of_plan(record, draw, chosen_ramp(workers), min_lead_s=0.06, in_hand=0.0)
        for cost_s in (0.0, 0.004, 0.013, 0.05):
            fitted = [
                fitted_ramp(chosen_ramp(workers), cost_s, wait_s=wait_s, frame_s=0.08, shared=workers > 3)
                for wait_s in (0.0, 0.05)
            ]
            record(f"ramps of {workers} at {cost_s}", *fitted)
    record("recalls", *(recall_sizes(frames, (12, 8, 4, 1)) for frames in (0, 1, 11, 12, 37)))
    for background in (False, True):
        for in_hand_s in (0.0, 1.3):
            listener = Listener.of(background=background, in_hand_s=in_hand_s)
            for _ in range(25):
                clock.now_s += draw.choice([0.01, 0.3, 1.1])
                what = draw.choice([f"deliver {draw.choice([0.08, 0.5])}", "postpone 0.2", "reset"])
                late_s = None
                if what == "reset":
                    listener.reset_due(now_s=clock.now_s)
                elif what.startswith("deliver"):
                    late_s = listener.deliver(float(what.split()[1]), now_s=clock.now_s)
                else:
                    listener.postpone(0.2)
                record(
                    f"{clock.now_s:.2f} {what}",
                    late_s,
                    listener,
                    listener.deadline_s(clock.now_s),
                    listener.lead_s(clock.now_s),
                )

    async def read(pauses: list[float], *, fails: bool, slow: float) -> None:
        async def pause() -> None:
            record(f"  {clock.now_s:.2f} pause")
            await asyncio.sleep(slow)
            if fails:
                raise OSError("could not close")

        items = iter(range(6))

        async def next_item() -> int | None:
            return next(items, None)

        record("reader", pauses, fails=fails, slow=slow)
        try:
            async with ReaderTimeout(pause, record.fake("resume")) as reader:
                for number, pause_s in enumerate(pauses):
                    item = await reader.read(next_item, is_watched=number > 0)
                    record(f"  {clock.now_s:.2f} item", item, reader.was_paused)
                    await asyncio.sleep(pause_s)
        except OSError as error:
            record("  !", error)

    for pauses in ([11.0, 3.0, 12.0], [1.0, 9.9, 9.9, 10.5, 21.0, 1.0, 30.0, 1.0], []):
        for fails, slow in ((False, 0.0), (False, 5.0), (True, 0.0)):
            run_virtual(clock, read(pauses, fails=fails, slow=slow))
    record.check("listeners")


def test_messages() -> None:
    record, draw = Record((r"\\n +For further information visit \S+", "")), random.Random(4)
    codes = np.arange(24, dtype=np.int16).reshape(6, 4)
    prompt = protocol.ClonePrompt(np.arange(3, dtype=np.float64), codes[:2])
    chunks = []
    for number in range(12):
        frames = codes[number % 5 : number % 5 + draw.choice([0, 1, 2])]
        marks = (("codes", number),) if number in (3, 5) else ()
        readings = (Reading(number, (1.5 * number, 2.0)), Reading(number + 1, (7.0,)))[: draw.choice([0, 1, 2])]
        beside = marks, readings, prompt if number in (2, 4) else None, ((f"T#{number}", number),)
        chunks.append(FrameChunk(frames, draw.randint(1, 9), None, bytes([number] * 4), *beside))
    for first in range(0, 11, 2):
        joined = FrameChunk.join([*chunks[first : first + 3], FrameChunk(codes[:1], 3, FinishReason.EARLY)])
        record("joined", pickle.loads(pickle.dumps(joined)), joined.codes[:, 0].tolist())
    told = (("a", 1),), (Reading(1, (2.0,)),), prompt, (("b", 2),), ((0.5, 3.0),), 2**63, 4
    audio = PcmChunk(b"\1\2\3\4", codes[:1], 5, FinishReason.LOOP, 17, *told)
    record("pcm", pickle.loads(pickle.dumps(audio)), audio.num_samples, audio.is_heartbeat, audio.emptied())
    silent = replace(audio, pcm=b"")
    for sparse in (silent, replace(silent, codes=codes[:0]), replace(silent, codes=codes[:0], finish_reason=None)):
        record("is a heartbeat", sparse.is_heartbeat)
    vector = replace(prompt, codes=None)
    record("prompts", prompt.nbytes, vector.nbytes, pickle.loads(pickle.dumps(vector)))
    spoken = (
        Reference(np.ones(9, np.float32), "said"),
        Reference(np.ones(8, np.float32), x_vector_only=True),
        Reference(None, prompt=prompt, key=b"k"),
    )
    for each in spoken:
        for other in (None, prompt, replace(prompt, codes=None)):
            record("with prompt", each.with_prompt(other), each.key[:4])
    resume = protocol.Progress(codes[:3], 55, 1.25)
    for changes in (
        {},
        {"tail": Tail("囁き", codes[:1])},
        {"tail": Tail("so ", codes[:2]), "reference_codes": codes[3:]},
        {"resume": resume},
        {"continues": True, "reference_codes": codes},
    ):
        asked: Any = SynthesisRequest("r", "t", **changes)
        before = None if asked.before is None else asked.before[:, 0].tolist()
        record("request", [*changes], repr(asked.gap), asked.in_hand_s, asked.is_continuation, asked.prefix, before)
    for name, kind in sorted(vars(errors).items()):
        if isinstance(kind, type) and issubclass(kind, errors.TalkrayError):
            for arguments in (("was ist 囁き?",), ("m", 2.5), ("m", "param", "code")):
                try:
                    error = pickle.loads(pickle.dumps(kind(*arguments)))  # type: ignore[arg-type]
                except TypeError:
                    continue
                record(name, str(error), vars(error), kind.__mro__[1].__name__)
    wrong = (
        "device: tpu/max_num_seqs: 0/max_model_len: 63/gpu_memory_fraction: 1.1/gpu_memory_fraction: 0/keep_alive_s: 0"
    )
    wrong += "/threads: 0/max_num_waiting: -1/kv_cache_bytes: 0/unknown: 1/keep_alive_s: 5 device: cpu"
    wrong += "/kv_cache_bytes: 5 gpu_memory_fraction: 0.5/deterministic: 7 attention: none kernels: fused"
    for settings in (*wrong.split("/"), "", "max_num_seqs: 1 max_model_len: 64 keep_alive_s: 5"):
        words = settings.split()
        given = dict(zip((word[:-1] for word in words[::2]), words[1::2], strict=True))
        record.attempt(f"talker {settings}", lambda given=given: config.TalkerConfig(**given))  # type: ignore[misc]
    good = {"device": "auto", "precision": "float16", "placement": "inline"}
    for given in ({}, {"workers": 0}, {"placement": "gpu"}, {"precision": "int8"}, good):
        record.attempt(f"codec {given}", lambda given=given: config.CodecConfig(**given))  # type: ignore[misc]
    record.attempt("frozen", lambda: setattr(config.CodecConfig(), "workers", 3))
    record("equal", len({config.CodecConfig(), pickle.loads(pickle.dumps(config.CodecConfig(device="cpu")))}))
    record("records", TalkerRecord(1, 2, 0.3, 4), CodecRecord(1, 2, 3, 4, 5, 6), CodecRecord())
    first = Start(100.0, stage="loading")
    done = first.ended(130.5)
    later, failed = done.next(500.0), first.ended(9.0, failed="no")
    for each in (first, done, later, later.next(600.0), first.ended(120.0, failed="no"), failed.next(7.0)):
        record(start_key("app", "Talker: 囁き"), Start.read(each.note()), each.note().decode())
    record.check("messages")


def test_metrics_reach_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    record, clock = Record(), virtual_clock(monkeypatch)
    monkeypatch.setattr(ray_metrics.Recorder, "run", RUN)

    class Stop(BaseException):
        pass

    def instrument(kind: str, method: str) -> type:
        def created(self: Any, name: str, description: str, *more: Any) -> None:
            self.name = name
            record(f"{kind} {name}: {description}", *more)

        def passed(self: Any, value: float, tags: dict[str, str] | None = None) -> None:
            if value < 0:
                raise ValueError("a counter cannot fall")
            record(f"  {kind} {self.name}", value, OrderedDict(tags or {}))

        return type(kind, (), {"__init__": created, method: passed, "_record": passed})

    monkeypatch.setattr(ray_metrics.ray, "Histogram", instrument("histogram", "observe"))
    monkeypatch.setattr(ray_metrics.ray, "Counter", instrument("counter", "inc"))
    gauge = instrument("gauge", "set")
    monkeypatch.setattr(ray_metrics.ray.Gauge, "__init__", gauge.__init__)
    monkeypatch.setattr(ray_metrics.ray.Gauge, "set", gauge.set)  # type: ignore[attr-defined]
    thread = type(
        "Thread",
        (),
        {"__init__": lambda self, *, target, **options: record("thread", **options), "start": record.fake("start")},
    )
    monkeypatch.setattr(ray_metrics.threading, "Thread", thread)
    for each in metrics.INSTRUMENTS:
        monkeypatch.setattr(each, "record", each.record)
    until_s = 0.0

    def sleep(seconds: float) -> None:
        clock.now_s += seconds
        if clock.now_s > until_s:
            raise Stop

    monkeypatch.setattr(ray_metrics.time, "sleep", sleep)
    for model, pool, models in (
        ("", "ingress", ("", "b")),
        ("a", "talker", ("",)),
        ("b", "codec", ("",)),
        ("", None, ("",)),
    ):
        record(f"-- {pool} of {model!r}")
        until_s = clock.now_s + 11.5
        recorder = ray_metrics.install.__wrapped__(model, pool=pool, models=models)
        with record.logs("deployments"):
            metrics.record_chunk(0.4, late_s=0.0, model="x")
            metrics.record_chunk(0.6, late_s=0.03)
            metrics.record_stream(2.0, audio_s=5.0, reason=FinishReason.LOOP, model="x")
            metrics.record_stream(3.0, audio_s=0.0, reason=None)
            metrics.record_talker_step(0.02, 7, 0.6, waiting=3)
            metrics.record_talker_step(0.02, 0, 0.1, waiting=2)
            metrics.record_codec_call(0.3, 4, waiting=9, lag_s=1.5)
            metrics.record_recording_lookups("speaker", metrics.Lookups(5, 8))
            metrics.AUDIO.record(-1.0)
            metrics.DIED.record(2, pool="talker", model="y")
            metrics.FAILOVERS.record(0, reason="CodecLost")
            try:
                recorder.run()
            except Stop:
                metrics.STREAMS.record(4)
                recorder.deliver()
    record.check("metrics")


def test_text_from_a_mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections break at each place: before a part, within its length, within a character, behind it."""
    record, draw, clock = Record(), random.Random(6), virtual_clock(monkeypatch)
    text = "one, 囁き, ещё\nслово 🙂 end."

    async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, Any]:
        what = draw.random()
        if what < 0.2:
            raise OSError(f"no route to {host}:{port}")
        if what < 0.3:
            await asyncio.sleep(5)
        reader, asked = asyncio.StreamReader(), asyncio.get_running_loop().create_future()
        writer: Any = type(
            "Writer", (), {"write": lambda self, data: asked.set_result(data), "close": record.fake("close")}
        )()

        async def answer() -> None:
            line = (await asked).decode()
            record(f"  {clock.now_s - 1000:.2f} asked {line.strip()}")
            data, at = b"", int(line.split()[1])
            while at < len(text):
                part = text[at : at + draw.randint(1, 9)]
                at += len(part)
                data += struct.pack(">I", len(part.encode())) + part.encode()
            data += struct.pack(">I", 0)
            reader.feed_data(data[: draw.randint(0, 3 * len(data) // 2)])
            reader.feed_eof()

        keep.append(asyncio.create_task(answer()))
        return reader, writer

    keep: list[Any] = []
    monkeypatch.setattr(asyncio, "open_connection", connect)

    async def read() -> None:
        got = ""
        try:
            async with aclosing(mailbox.read(Mailbox("10.0.0.7", 4711, "tok"))) as parts:
                async for part in parts:
                    got += part
                    record(f"  part {part!r}")
            assert got == text
            record("  the end")
        except errors.TalkerLost as error:
            record("  !", error)

    with record.logs("deployments"):
        for number in range(25):
            record(f"text {number}")
            run_virtual(clock, read())
    record.check("mailbox")
