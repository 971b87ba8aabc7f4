"""What one GPU would do with the traffic of `loadtest --traffic mixed`: `python -m tools.experiments.one_gpu`.

The admission, the segments, the scheduler and the codec's calls are production's, in a time that nobody waits for. What
is assumed is what a step, a prompt and a call take, by their rows and frames, and how long a request is on its way.
"""

import argparse
import asyncio
import math
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from deployments.codec.slots import DecodeCall
from deployments.errors import EngineError, Overloaded
from deployments.listener import Listener
from deployments.protocol import (
    ALL_FRAMES,
    FinishReason,
    FrameChunk,
    ModelInfo,
    ModelKind,
    Pcm,
    PcmChunk,
    Sampling,
    SynthesisRequest,
)
from deployments.serving import failover, metrics
from deployments.serving.failover import with_failover
from deployments.serving.replica_streams import TalkerAudio
from deployments.talker.audio import audio_streams
from deployments.talker.audio.audio_streams import AudioStreams
from deployments.talker.engine import scheduler
from deployments.talker.engine.device import MAX_LEAD_S
from deployments.talker.engine.scheduler import Scheduler
from deployments.talker.state.kv_cache import BlockManager
from deployments.talker.state.sequence import FrameLimit
from deployments.talker.state.sequence import Sequence as Spoken
from deployments.talker.text.prompt import Prompt
from loadtest.arrivals import (
    INSTRUCTION,
    LEAVES_S,
    LONG_SEGMENTS,
    Profile,
    RequestKind,
    ScheduledRequest,
    SpeechLengths,
    settled,
)
from loadtest.codec_pool import VirtualTimeLoop
from loadtest.settings import Settings
from loadtest.tables import Table
from loadtest.terminal import output_console, print_table
from serve_app.config import AdmissionSettings
from serve_app.speech import room, speech_models
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModel

INFO = ModelInfo(
    name="modelled",
    kind=ModelKind.CUSTOM_VOICE,
    voices=("ryan",),
    languages=("english",),
    supports_instructions=True,
    sample_rate=24000,
    frame_samples=1920,
    num_code_groups=16,
    talker_on_gpu=True,
)
_CODES = np.zeros((1, INFO.num_code_groups), np.int16)
_SOUND = np.full(INFO.frame_samples * 12, 4000, np.int16)
_BLOCK = 64
_HEARD_S = 0.001  # a pause


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, as `talkray bench engine` and `bench codec` have them on an H200."""

    rows: tuple[float, ...] = (1, 64, 128, 256)
    step_s: tuple[float, ...] = (0.0026, 0.0036, 0.0047, 0.0068)
    prompt_rows: tuple[float, ...] = (16, 128, 300, 512)
    prompt_s: tuple[float, ...] = (0.0013, 0.0016, 0.003, 0.0043)
    call_s: float = 0.0006
    frame_s: float = 0.0000156
    shared: float = 1.3  # how much longer each takes beside the other
    host_s: float = 0.0008  # between two steps
    codes_share: float = 0.55  # of a step, after which its codes are there
    way_s: float = 0.0066  # of a request, before and behind the engine

    def step(self, rows: int) -> float:
        return self.shared * float(np.interp(rows, self.rows, self.step_s))

    def prompt(self, rows: int) -> float:
        return self.shared * float(np.interp(rows, self.prompt_rows, self.prompt_s))

    def call(self, frames: int) -> float:
        return self.shared * (self.call_s + frames * self.frame_s)


@dataclass(slots=True)
class _Call(DecodeCall):
    now_s: Callable[[], float]
    ends_s: float
    pcm: list[Pcm | EngineError]

    @property
    def done(self) -> bool:
        return self.now_s() >= self.ends_s

    def result(self) -> list[Pcm | EngineError]:
        return self.pcm


class _Slots:
    """Stands in for a `SlotDecoder`: calls run one after the other."""

    precision, repaired, reach = "float16", 0, 72

    def __init__(self, num_slots: int, costs: Costs, now_s: Callable[[], float]) -> None:
        self.num_slots, self._costs, self._now_s = num_slots, costs, now_s
        self.free_s = self.busy_s = 0.0
        self._ends_s: list[float] = []  # of calls under way

    def next_s(self) -> float:
        """When the next call ends; inf without one."""
        self._ends_s = [end_s for end_s in self._ends_s if end_s > self._now_s()]
        return min(self._ends_s, default=math.inf)

    def largest_batch(self, frames: int) -> int:
        return 384 // frames

    def begin(self, slot: int, state: object = None) -> None: ...

    def write(self, slots: Sequence[int], positions: Sequence[int], codes: torch.Tensor) -> None: ...

    def decode(self, slots: Sequence[int], frames: int) -> _Call:
        took_s = self._costs.call((1 << (len(slots) - 1).bit_length()) * frames)
        self.free_s = max(self._now_s(), self.free_s) + took_s
        self.busy_s += took_s
        self._ends_s.append(self.free_s)
        return _Call(self._now_s, self.free_s, [_SOUND[: frames * INFO.frame_samples]] * len(slots))


class ModelledGpu:
    """A talker and its codec: the engine's loop with costs in place of its work. A synthesizer for the admission."""

    def __init__(self, costs: Costs, *, max_num_seqs: int = 256, max_num_waiting: int = 128) -> None:
        self._costs, now_s = costs, asyncio.get_running_loop().time
        self._now_s = now_s
        self.slots = _Slots(2 * max_num_seqs, costs, now_s)
        self.scheduler = Scheduler(
            BlockManager(max_num_seqs * 16 + 1, _BLOCK),
            max_num_seqs=max_num_seqs,
            max_num_waiting=max_num_waiting,
            max_lead_s=MAX_LEAD_S,
        )
        self._audio = AudioStreams(lambda: self.slots, frame_s=INFO.frame_s, precision="float16")  # type: ignore[return-value]
        self._queues: dict[int, asyncio.Queue[FrameChunk | Exception]] = {}
        self._endings: dict[int, Spoken] = {}
        self._numbers = iter(range(sys.maxsize))
        self._wake = asyncio.Event()
        self.steps = self.rows = self.prompts = self.most_running = self.most_waiting = 0
        self.most_lead_s = 0.0

    async def describe(self) -> ModelInfo:
        return INFO

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        return with_failover(TalkerAudio(request, self._generate, info))

    async def _generate(self, request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        await asyncio.sleep(self._costs.way_s)
        if not request.is_underway:
            self.scheduler.check_room()
        number, queue = next(self._numbers), asyncio.Queue[FrameChunk | Exception]()
        self._queues[number] = queue
        self.scheduler.add(_sequence(number, request))
        self._wake.set()
        try:
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            del self._queues[number]
            self.scheduler.abort(number)
            self._endings.pop(number, None)
            self._audio.close(number)

    async def run(self) -> None:
        """Step after step."""
        while True:
            batch = self.scheduler.schedule()
            self._send_audio()
            if batch is None:
                self._wake.clear()
                busy_s = max(0.0005, self.slots.free_s - self._now_s())
                try:
                    async with asyncio.timeout(None if self._audio.is_idle else busy_s):
                        await self._wake.wait()
                except TimeoutError:
                    continue
                continue
            self._count(len(batch.decode), len(batch.prefill))
            for each in batch.prefill:
                self._open(each)
            prompts_s = sum(self._costs.prompt(each.num_positions) for each in batch.prefill)
            step_s = self._costs.step(len(batch.decode)) if batch.decode else 0.0
            await self._pass(prompts_s + self._costs.codes_share * step_s)
            self._take_frames([each for each in batch.decode if each.row is not None])
            self.scheduler.retire(batch.decode)
            await self._pass((1 - self._costs.codes_share) * step_s + self._costs.host_s)

    def _count(self, rows: int, prompts: int) -> None:
        self.steps, self.rows, self.prompts = self.steps + 1, self.rows + rows, self.prompts + prompts
        self.most_running = max(self.most_running, len(self.scheduler.running))
        self.most_waiting = max(self.most_waiting, len(self.scheduler.waiting))

    def _open(self, each: Spoken) -> None:
        if each.is_open:
            return
        try:
            self._audio.open(each.id, None, num_frames=ALL_FRAMES)
            each.is_open = True
        except Overloaded as error:
            self._queues[each.id].put_nowait(error)

    def _take_frames(self, sequences: list[Spoken]) -> None:
        self._audio.add_frames([each.id for each in sequences], torch.from_numpy(np.repeat(_CODES, len(sequences), 0)))
        for each in sequences:
            each.append(_CODES[0])
            if each.finish_reason is not None:
                self._audio.finish(each.id)
                self._endings[each.id] = each

    async def _pass(self, seconds: float) -> None:
        """The time of some work, in which audio is sent as it is made."""
        until_s = self._now_s() + seconds
        while (left_s := until_s - self._now_s()) > 1e-9:
            await asyncio.sleep(min(left_s, self.slots.next_s() - self._now_s()))
            self._send_audio()

    def _send_audio(self) -> None:
        for number, pcm in self._audio.take():
            if number in self._queues:
                frames = len(pcm) // 2 // INFO.frame_samples
                self._queues[number].put_nowait(FrameChunk(np.repeat(_CODES, frames, 0), 60, None, pcm))
        for number in [number for number in self._endings if not self._audio.is_pending(number)]:
            reason = self._endings.pop(number).finish_reason
            self._queues[number].put_nowait(FrameChunk(_CODES[:0], 60, reason))


def _sequence(number: int, request: SynthesisRequest) -> Spoken:
    """A token has about four characters; names, roles and the instruction take some more rows."""
    text = len(request.text) // 4
    ids = np.zeros(15 + text + len(request.instructions or "") // 4, np.int32)
    limit = FrameLimit((request.sampling.max_new_tokens or 2) - 1, FinishReason.LENGTH)
    prompt = Prompt(ids, ids, ids[:1], num_text_tokens=text)
    return Spoken(number, request, prompt, Sampling(), limit, frame_s=INFO.frame_s)


@dataclass(slots=True)
class Heard:
    """One request; without a first audio it was refused or left before it."""

    kind: RequestKind
    came_s: float
    first_s: float | None = None
    refused: str | None = None
    audio_s: float = 0.0
    listener: Listener = field(default_factory=Listener)

    @property
    def is_stalled(self) -> bool:
        return self.listener.stalled_s > _HEARD_S


async def _listen(gateway: SpeechModel, request: ScheduledRequest, costs: Costs, heard: Heard) -> None:
    now_s, segments = asyncio.get_running_loop().time, LONG_SEGMENTS if request.kind is RequestKind.LONG else 1
    assert request.frames is not None
    synthesis = SynthesisRequest(
        f"{request.index}",
        request.text,
        voice="ryan",
        instructions=INSTRUCTION if request.kind is RequestKind.INSTRUCTED else None,
        sampling=Sampling(max_new_tokens=request.frames // segments + 1),
        ignore_eos=True,
        client="127.0.0.1",
    )
    patience_s = LEAVES_S if request.kind is RequestKind.LEAVES else None
    try:
        async with asyncio.timeout(patience_s), aclosing(gateway.speak(Utterance(synthesis), INFO)) as chunks:
            async for chunk in chunks:
                if not chunk.pcm:
                    continue
                chunk_s = len(chunk.pcm) / 2 / INFO.sample_rate
                heard.first_s = heard.first_s or now_s() - heard.came_s
                heard.listener.deliver(chunk_s, now_s=now_s())
                heard.audio_s += chunk_s
                if request.kind is RequestKind.SLOW:
                    await asyncio.sleep(max(0.0, heard.listener.lead_s(now_s())))
    except TimeoutError:
        pass
    except Overloaded as error:
        heard.refused = str(error)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one rate."""

    heard: list[Heard]
    audio_s_per_s: float
    refused: Counter[str]
    gpu: ModelledGpu
    seconds: float

    def first_ms(self, percent: float, kind: RequestKind = RequestKind.PARAGRAPH) -> float:
        times_s = [each.first_s for each in self.heard if each.kind is kind and each.first_s is not None]
        return 1000 * float(np.percentile(times_s, percent)) if times_s else math.inf


async def _serve(rate: float, seconds: float, settle_s: float, costs: Costs, seed: int, rows: int) -> Outcome:
    loop = asyncio.get_running_loop()
    gpu, refused = ModelledGpu(costs, max_num_seqs=rows, max_num_waiting=rows // 2), Counter[str]()
    gateway = SpeechModel(gpu, AdmissionSettings())
    settings = Settings(
        "", phases=settled(rate, seconds, settle_s=settle_s), seed=seed, lengths=SpeechLengths(5.7, 0.35),
        profile=Profile.MIXED,
    )  # fmt: skip
    serving = asyncio.create_task(gpu.run())
    listeners, heard = [], []
    began_s = loop.time()
    with mock.patch.object(metrics, "refused", lambda reason, *, model="": refused.update([reason])):
        for request in settings.schedule():
            await asyncio.sleep(began_s + request.planned_s - loop.time())
            if request.planned_s < settle_s:
                refused.clear()
            assert request.kind is not None
            heard.append(Heard(request.kind, loop.time()))
            listeners.append(asyncio.create_task(_listen(gateway, request, costs, heard[-1])))
            if serving.done():
                serving.result()
        await asyncio.sleep(began_s + settle_s + seconds - loop.time())
        measured = [each for each in heard if each.came_s >= began_s + settle_s]
        made_s = sum(each.audio_s for each in measured) / seconds
        for each in (*listeners, serving):
            each.cancel()
        await asyncio.gather(*listeners, serving, return_exceptions=True)
    return Outcome(measured, made_s, refused, gpu, settle_s + seconds)


def serve(
    rate: float, *, seconds: float = 30.0, settle_s: float = 0.0, costs: Costs = Costs(), seed: int = 1, rows: int = 256
) -> Outcome:
    """The mix at this rate, until `seconds` after it has settled; what is not over by then is cut."""
    loop = VirtualTimeLoop()
    clock = SimpleNamespace(monotonic=loop.time)
    try:
        with ExitStack() as patched:
            for module in (speech_models, room, scheduler, audio_streams, failover):
                patched.enter_context(mock.patch.object(module, "time", clock))
            return loop.run_until_complete(_serve(rate, seconds, settle_s, costs, seed, rows))
    finally:
        loop.close()


def table(by_rate: dict[float, Outcome]) -> Table:
    """A row for each rate."""
    titles = (
        *("r/s", "paragraphs p50 / p95, ms", "audio s/s", "refused", "stalled", "rows a step", "step, ms"),
        *("running, waiting at most", "codec busy"),
    )
    rows = []
    for rate, done in by_rate.items():
        spoken = [each for each in done.heard if each.first_s is not None]
        gpu = done.gpu
        rows.append((
            f"{rate:g}",
            f"{done.first_ms(50):.1f} / {done.first_ms(95):.1f}",
            f"{done.audio_s_per_s:.0f}",
            f"{sum(each.refused is not None for each in done.heard)} of {len(done.heard)} {dict(done.refused) or ''}",
            f"{sum(each.is_stalled for each in spoken)} of {len(spoken)}",
            f"{gpu.rows / max(1, gpu.steps):.0f}",
            f"{1000 * done.seconds / max(1, gpu.steps):.1f}",
            f"{gpu.most_running}, {gpu.most_waiting}",
            f"{gpu.slots.busy_s / done.seconds:.0%}",
        ))  # fmt: skip
    return Table(titles, rows)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.experiments.one_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="60,80,100")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--settle", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=256, help="talker.max_num_seqs")
    parser.add_argument("--shared", type=float, default=1.3, help="how much longer all work takes beside other work")
    options = parser.parse_args(arguments)
    rates = [float(rate) for rate in options.rates.split(",")]
    costs = Costs(shared=options.shared)
    times = {"seconds": options.seconds, "settle_s": options.settle}
    done = {rate: serve(rate, **times, costs=costs, seed=options.seed, rows=options.rows) for rate in rates}
    print_table(table(done), output_console())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
