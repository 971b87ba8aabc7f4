"""The engine on a GPU that is not there: what leaves it while requests come, write, leave and fail."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments.errors import EngineError, TalkrayError
from deployments.protocol import (
    ALL_FRAMES,
    ClonePrompt,
    Codes,
    FrameChunk,
    Mailbox,
    ModelKind,
    Pcm,
    Progress,
    Reference,
    Sampling,
    SynthesisRequest,
    Tail,
)
from deployments.talker.audio.audio_streams import AudioStreams
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.input_processor import LengthLimits
from deployments.talker.engine.scheduler import Scheduler
from deployments.talker.networks.frame_networks import NOT_FINITE
from deployments.talker.process.engine_process import take_load
from deployments.talker.state.kv_cache import BlockManager
from deployments.talker.state.sequence import Sequence
from deployments.talker.text.prompt import PromptBuilder
from tests.clock import Clock
from tests.records import Record
from tests.virtual_time import virtual_clock

FRAME_S, SAMPLES = 0.08, 8
WORDS = ["one", "two", "three", "four", "five", "six", "seven,", "eight", "nine", "ten.", "囁き", "и", "ещё", "слово!"]


@dataclass(slots=True)
class Script:
    """What becomes of a sequence: when it ends, and where its state stops being finite."""

    ends: int
    dies: int = 9999
    silent: int = 0  # frames in front
    reads: float = 1.0  # tokens a frame
    repeats: int = 9999  # from this frame on it reads the beginning again

    def place(self, number: int) -> tuple[float, float]:
        """What the alignment head sees of the text: a share of its attention, and where."""
        mass = 0.5 if number % 7 else 0.1
        return mass, mass * self.reads * (number + 1 if number < self.repeats else number % 3)


@dataclass(eq=False)
class Device:
    """One queue of work. `scripts` are by request id."""

    clock: Clock
    record: Record
    scripts: dict[str, Script] = field(default_factory=dict)
    free_s: float = 0.0
    failing: int = 0  # prefills

    def work(self, seconds: float) -> float:
        self.free_s = max(self.free_s, self.clock.now_s) + seconds
        return self.free_s


class Runner:
    """A ModelRunner as the engine sees it. Frames are [code, number, id]."""

    on_gpu, cuda_stream, buckets, most_positions, has_pending_advance = True, None, [1, 2, 8], 60, False

    def __init__(self, device: Device, name: str) -> None:
        self._device, self._name = device, name
        self.shape = SimpleNamespace(networks="plain", deterministic=False)
        self.device = SimpleNamespace(type="cuda")

    def run_pending_advance(self) -> None:
        pass

    def extend_text(self, sequence: Sequence, start: int) -> None:
        self._device.record(f"    {self._name}: text of {sequence.id} from {start}", row=sequence.row)

    def prefill(self, sequences: list[Sequence]) -> None:
        if not sequences:
            return
        rows = ", ".join(f"{each.id} (row {each.row}, {each.num_positions} positions)" for each in sequences)
        self._device.record(f"    {self._name}: prefill {rows}")
        if self._device.failing:
            self._device.failing -= 1
            raise RuntimeError(f"prefill {self._device.failing} fails")
        self._device.work(0.004 + 0.001 * len(sequences))

    def queue_step(self, sequences: list[Sequence], on_codes: Callable[[Any], None]) -> Any:
        import torch

        frames = np.stack([self._frame(each) for each in sequences])
        has_codes_s = self._device.work(0.011 + 0.0007 * len(sequences))
        on_codes(torch.from_numpy(frames))
        over_s = self._device.work(0.003)
        clock, scripts = self._device.clock, self._device.scripts
        self._device.record(f"    {self._name}: step {', '.join(str(each.id) for each in sequences)}")
        places = [scripts[each.request.request_id].place(each.num_frames) for each in sequences]
        return Step(sequences, frames, places, clock, has_codes_s, over_s)

    def _frame(self, sequence: Sequence) -> np.ndarray:
        script, number = self._device.scripts[sequence.request.request_id], sequence.num_frames
        first = EOS if number >= script.ends else NOT_FINITE if number >= script.dies else number % 50
        return np.array([first, number, sequence.id, number < script.silent] + [0] * 12, np.int16)


EOS = 2150


@dataclass(eq=False)
class Step:
    sequences: list[Sequence]
    frames: Codes
    places: list[tuple[float, float]]
    clock: Clock
    has_codes_s: float
    over_s: float

    @property
    def has_codes(self) -> bool:
        return self.clock.now_s >= self.has_codes_s

    @property
    def is_over(self) -> bool:
        return self.clock.now_s >= self.over_s

    def result(self) -> Codes:
        assert self.has_codes
        return self.frames

    def readings(self) -> list[tuple[float, float]]:
        return self.places

    def advance_ns(self) -> int:
        return round((self.over_s - self.has_codes_s) * 1e9)


class Slots:
    """A SlotDecoder. Samples are the numbers of their frames plus 1,000, or 0 for silent ones."""

    precision, reach, repaired = "float16", 5, 0

    def __init__(self, device: Device, num_slots: int) -> None:
        self._device, self.num_slots = device, num_slots
        self._codes: dict[int, list[np.ndarray]] = {}
        self._next: dict[int, int] = {}
        self.failing = 0

    def largest_batch(self, frames: int) -> int:
        return 16 // frames

    def start_slot(self, slot: int, state: object = None) -> None:
        self._device.record(f"    codec: slot {slot} starts", state)
        self._codes[slot], self._next[slot] = [], 0 if state is None else int(str(state).split()[-1])

    def state(self, slot: int) -> object:
        return f"state after {self._next[slot]}"

    def write(self, slots: list[int], positions: list[int], codes: Any) -> None:
        for slot, position, frame in zip(slots, positions, codes.numpy(), strict=True):
            kept = self._codes[slot]
            kept.extend([frame] * (position + 1 - len(kept)))
            kept[position] = frame

    def recall(self, slot: int, frames: int) -> None:
        self._device.record(f"    codec: slot {slot} recalls {frames}")
        if self.failing:
            self.failing -= 1
            raise EngineError("the recording is not finite")
        self._next[slot] += frames

    def decode(self, slots: list[int], frames: int) -> Any:
        done_s = self._device.work(0.002 * frames)
        pcm: list[Pcm | EngineError] = []
        for slot in slots:
            begin = self._next[slot]
            self._next[slot] += frames
            taken = [*self._codes[slot][begin : begin + frames]]
            taken += taken[-1:] * (frames - len(taken))
            values = [0 if frame[3] else 1000 + frame[1] for frame in taken]
            pcm.append(np.repeat(np.array(values, np.int16), SAMPLES))
        if self.failing:
            self.failing -= 1
            pcm[0] = EngineError("these codes cannot be decoded")
        self._device.record(f"    codec: decode {frames} of slots {', '.join(map(str, slots))}")
        clock = self._device.clock
        return Call(clock, done_s, pcm)

    def barrier(self) -> None:
        self._device.record("    codec: barrier")


@dataclass
class Call:
    clock: Clock
    done_s: float
    pcm: list[Pcm | EngineError]

    @property
    def done(self) -> bool:
        return self.clock.now_s >= self.done_s

    def result(self) -> list[Pcm | EngineError]:
        self.clock.now_s = max(self.clock.now_s, self.done_s)
        return self.pcm


def told(chunk: FrameChunk) -> str:
    """A chunk in words: which frames, which audio, and what else it carries."""
    parts = [f"of {chunk.num_text_tokens} tokens"]
    if len(chunk.codes):
        parts.insert(0, f"frames {chunk.codes[0, 1]}-{chunk.codes[-1, 1]}")
    if chunk.pcm:
        pcm = np.frombuffer(chunk.pcm, np.int16)[::SAMPLES]
        parts.append(f"audio {pcm[0]}-{pcm[-1]} ({len(pcm)})")
    if chunk.clone_prompt:
        parts.append(f"clone prompt {chunk.clone_prompt.codes is not None}")
    for reading in chunk.readings:
        parts += [f"from {reading.first} at chars", *(f"{char:.1f}" for char in reading.chars)]
    return ", ".join(parts) + (f", {chunk.finish_reason}" if chunk.finish_reason else "")


class Scenario:
    def __init__(self, model: Engine, clock: Clock, seed: int, **sizes: Any) -> None:
        self.record = Record()
        self.device, self.clock, self.draw = Device(clock, self.record), clock, random.Random(seed)
        prompts = PromptBuilder(model.prompts.tables, model.prompts.tokenizer, model.prompts.speaker_encoder)
        prompts.config = replace(prompts.config, codes=replace(prompts.config.codes, eos=EOS))
        if model.info.kind is ModelKind.VOICE_DESIGN:
            prompts.config = replace(prompts.config, text=replace(prompts.config.text, alignment_head=(0, 0)))
        blocks = BlockManager(sizes.pop("blocks") + 1, 8)
        limits = LengthLimits(prompts.tokenizer, max_positions=blocks.capacity, frame_s=FRAME_S)
        info = replace(model.info, frame_samples=SAMPLES, sample_rate=round(SAMPLES / FRAME_S), talker_on_gpu=True)
        num_slots = sizes.pop("slots")
        self.slots = Slots(self.device, num_slots)
        audio = AudioStreams(lambda: self.slots, num_slots=num_slots, frame_s=FRAME_S, precision="float16")  # type: ignore
        runner: Any = Runner(self.device, "talker")
        self.engine = Engine(info, prompts, limits, runner, Scheduler(blocks, **sizes), audio)
        self.engine.lanes.runners = [Runner(self.device, "lane 1"), Runner(self.device, "lane 2")]  # type: ignore
        hidden = model.model_config.talker.hidden_size
        prompt, key = ClonePrompt(np.ones(hidden, np.float32), np.full((6, 16), 3, np.int16)), b"0123456789abcdef"
        samples = np.linspace(-0.5, 0.5, 12000, dtype=np.float32)
        of_base = [Reference(None, "Said.", prompt=prompt, key=key), Reference(samples, "Said, too.", key=b"x" * 20)]
        self.voices = of_base if model.prompts.speaker_encoder else []
        self.live: list[int] = []
        self.known: list[int] = []
        self.number = 0

    def request(self, script: Script, **changes: Any) -> SynthesisRequest:
        self.device.scripts[name := f"r{self.number}"] = script
        return SynthesisRequest(name, **{"text": "Hello.", "voice": "ryan" if not self.voices else None, **changes})

    def add(self, request: SynthesisRequest) -> None:
        number, self.number = self.number, self.number + 1
        self.act(f"add {number}", lambda: self.engine.add(number, request), number, told_of(request))
        self.known.append(number)
        if request.mailbox is not None:
            self.live.append(number)

    def act(self, event: str, call: Callable[[], object], number: int, more: str = "") -> None:
        self.record(f"{self.clock.now_s - 1000:.4f} {event} {more}")
        try:
            call()
        except TalkrayError as error:
            self.record(f"  ! {type(error).__name__}: {error}")
            if getattr(error, "retry_after_s", 0):
                self.record(f"    again in {error.retry_after_s:.3f} s")  # type: ignore[attr-defined]
            self.engine.abort(number)

    def drawn_request(self) -> SynthesisRequest:
        draw = self.draw
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))
        script = Script(
            draw.choice([*range(1, 30), 99]),
            silent=draw.choice([0, 0, 0, 3]),
            reads=draw.choice([0.4, 0.7, 1.3, 4]),
            repeats=draw.choice([9, 9999]),
        )
        kind = draw.random()
        changes: dict[str, Any] = {"text": text, "gpu_frames": draw.choice([0, 0, 4, 9, ALL_FRAMES])}
        changes["sampling"] = Sampling(max_new_tokens=draw.choice([1, 2, 7, 23, None]))
        changes["word_times"] = draw.random() < 0.3
        changes["ignore_eos"] = draw.random() < 0.1
        if kind < 0.2:
            changes.update(background=True)
        elif kind < 0.4:
            changes.update(mailbox=Mailbox("h", 1, "t"), text="")
        elif kind < 0.55:
            frames = np.zeros((draw.randint(1, 12), 16), np.int16)
            frames[:, 1] = range(len(frames))
            samples = SAMPLES * draw.randint(0, len(frames)) + draw.choice([0, 3])
            changes.update(resume=Progress(frames, min(samples, SAMPLES * len(frames)), draw.choice([0.0, 0.31, 1.7])))
        elif kind < 0.65:
            changes.update(continues=True, following=(text, "и " * draw.choice([1, 150])))
        elif kind < 0.7:
            changes.update(tail=Tail(draw.choice(["before ", "前"]), np.full((draw.randint(1, 6), 16), 2, np.int16)))
        if self.voices and (kind > 0.7 or "tail" in changes):
            changes["reference"], changes["reference_codes"] = draw.choice(self.voices), np.full((6, 16), 3, np.int16)
        return self.request(script, **changes)

    def walk(self, events: int) -> None:
        draw, engine = self.draw, self.engine
        for _ in range(events):
            self.clock.now_s += draw.choice([0.0003, 0.002, 0.03, 0.2])
            what = draw.random()
            if what < 0.17:
                self.add(self.drawn_request())
            elif what < 0.27 and self.live:
                self.write(draw.choice(self.live))
            elif what < 0.30 and self.known:
                number = draw.choice(self.known)
                self.act(f"abort {number}", lambda number=number: engine.abort(number), number)  # type: ignore
            elif what < 0.32:
                self.device.failing = draw.choice([1, 2, 3])
            elif what < 0.34:
                self.slots.failing = 1
            elif what < 0.345:
                self.record("forget ->", engine.forget((b"0123456789abcdef",)), engine.forget((b"unknown",)))
            elif what < 0.36 and self.known:
                request = self.device.scripts[f"r{draw.choice(self.known)}"]
                request.dies = draw.choice([3, 9999, 9999])
            else:
                self.step()
        for number in [*self.live]:
            self.write(number, is_last=True)
        self.finish()
        self.add(self.request(Script(9), text="", mailbox=Mailbox("h", 1, "t")))  # alone, and slow to write
        for text in ("a b", "c d", ""):
            write = partial(engine.append_text, self.number - 1, text, is_last=not text)
            self.act(f"write {text!r}", write, self.number - 1)
            self.step()
            self.finish()

    def finish(self) -> None:
        while not self.engine.is_idle:
            self.clock.now_s += 0.01
            self.step()
        self.engine.check_integrity()

    def write(self, number: int, *, is_last: bool | None = None) -> None:
        text = " ".join(self.draw.choices(WORDS, k=self.draw.randint(0, 6)))
        is_last = self.draw.random() < 0.3 if is_last is None else is_last
        if is_last:
            self.live.remove(number)
        event, engine = f"write {number} {text!r}{' (last)' * is_last}", self.engine
        self.act(event, lambda: engine.append_text(number, text, is_last=is_last), number)

    def step(self) -> None:
        looks = iter(range(10**6))

        def meanwhile() -> None:
            self.clock.now_s += 0.0007
            if next(looks) == 3 and self.draw.random() < 0.4:
                self.add(self.drawn_request())

        self.record(f"{self.clock.now_s - 1000:.4f} step")
        try:
            output = self.engine.step(meanwhile)
        except Exception as error:
            self.record(f"  ! the engine fails: {type(error).__name__}: {error}")
            self.device.failing = 0
            return
        for number, chunk in output.chunks:
            self.record(f"  {number}: {told(chunk)}")
        for number, error in output.failures:
            self.record(f"  {number} failed: {type(error).__name__}: {error}")
        load = take_load(self.engine)
        line = self.engine.scheduler
        self.record(
            f"  {load.num_running} run, {load.num_waiting} wait, {load.num_background} jobs,"
            f" kv {abs(load.kv_used_ratio):.4f}, {line.num_free_rows} rows free, poll {self.engine.poll_timeout_s:.5f}"
        )


def told_of(request: SynthesisRequest) -> str:
    facts = [repr(request.text), f"gpu {min(request.gpu_frames, 999)}", f"max {request.sampling.max_new_tokens}"]
    facts += [name for name in ("background", "continues", "word_times", "ignore_eos") if getattr(request, name)]
    facts += ["live"] * (request.mailbox is not None)
    if request.resume is not None:
        facts.append(
            f"after {len(request.resume.codes)} frames, {request.resume.samples} samples, {request.in_hand_s} s"
        )
    if request.reference is not None:
        facts.append(f"clone {request.reference.text!r}")
    if request.tail is not None:
        facts.append(f"tail {request.tail.text!r} {len(request.tail.codes)}")
    return " ".join(facts)


@pytest.mark.parametrize(("kind", "sizes"), [
    ("CustomVoice", {"blocks": 26, "slots": 8, "max_num_seqs": 4, "max_num_waiting": 3, "max_lead_s": 0.5}),
    ("VoiceDesign", {"blocks": 160, "slots": 17, "max_num_seqs": 17, "max_num_waiting": 2, "max_lead_s": 0.4}),
    ("Base", {"blocks": 90, "slots": 5, "max_num_seqs": 3, "max_num_waiting": 0, "max_lead_s": 8.0}),
])  # fmt: skip
def test_an_engine_beside_a_gpu(
    engine_of: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch, kind: str, sizes: dict[str, Any]
) -> None:
    clock = virtual_clock(monkeypatch)
    scenario = Scenario(engine_of(kind), clock, len(kind), **sizes)
    with scenario.record.logs("deployments"):
        scenario.walk(350)
    scenario.record.check(f"engine-{kind.lower()}")
