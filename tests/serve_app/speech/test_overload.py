"""Twice the load that a server holds, in virtual time: the admission in front of a model of two small replicas."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest

from deployments.errors import Overloaded
from deployments.protocol import FinishReason, ModelInfo, PcmChunk, SynthesisRequest
from serve_app.config import AdmissionSettings
from serve_app.speech import admission_control, speech_models
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModel
from tests.serve_app.fake import CUSTOM_VOICE, chunk

FRAME_S = 0.08
RAMP = (1, 2, 4, 8, 12)
ROWS = 8
TICK_S = 0.01
PREFILL = 1.5  # frames that a beginning costs
# Seconds a frame with so many streams in flight: as measured on two cores, and on in the last direction.
STREAMS, FRAME_TIMES_S = (1.0, 2.0, 3.0, 5.0, 7.0, 15.0), (0.032, 0.036, 0.043, 0.067, 0.089, 0.189)
MAX_TTFB_S, MAX_STALL_S = 1.0, 0.5
CAPACITY = 2.4  # requests per second of 1.5 s of speech


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not sleep: its time jumps to whatever is due next."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> object:
            self.now_s += timeout or 0.0
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now_s


@dataclass(slots=True)
class Stream:
    done: float = -PREFILL  # frames
    moved: asyncio.Event = field(default_factory=asyncio.Event)


class SmallServer:
    """Streams share what there is; those beyond its rows wait."""

    def __init__(self, seed: int) -> None:
        self.running: list[Stream] = []
        self.waiting: deque[Stream] = deque()
        self.noise = np.random.default_rng((seed, 1))

    async def describe(self) -> ModelInfo:
        return CUSTOM_VOICE

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            while self.waiting and len(self.running) < ROWS:
                self.running.append(self.waiting.popleft())
            frame_s = np.interp(len(self.running), STREAMS, FRAME_TIMES_S) * self.noise.lognormal(0, 0.3)
            for stream in self.running:
                stream.done += TICK_S / frame_s
                stream.moved.set()

    async def synthesize(self, request: SynthesisRequest, info: object = None) -> AsyncGenerator[PcmChunk, None]:
        frames, stream = request.seed, Stream()
        self.waiting.append(stream)
        ends = [end for end in accumulate((*RAMP, *[RAMP[-1]] * frames)) if end < frames] + [frames]
        try:
            for begin, end in zip([0, *ends], ends, strict=False):
                while stream.done < end:
                    stream.moved.clear()
                    await stream.moved.wait()
                reason = FinishReason.STOP if end == frames else None
                yield chunk(b"00" * 1920 * (end - begin), frames=end - begin, finish_reason=reason)
        finally:
            (self.running if stream in self.running else self.waiting).remove(stream)


@dataclass(slots=True)
class Heard:
    """One request; without a time to its first audio it was refused."""

    due_s: float
    ttfb_s: float | None = None
    stall_s: float = 0.0
    retry_after_s: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.ttfb_s is not None and self.ttfb_s <= MAX_TTFB_S and self.stall_s <= MAX_STALL_S


async def listen(model: SpeechModel, frames: int) -> Heard:
    loop = asyncio.get_running_loop()
    heard, empty_s = Heard(loop.time()), 0.0
    try:
        async with aclosing(model.speak(Utterance(SynthesisRequest("id", "Hi.", seed=frames)), CUSTOM_VOICE)) as chunks:
            async for item in chunks:
                if heard.ttfb_s is None:
                    heard.ttfb_s, empty_s = loop.time() - heard.due_s, loop.time()
                heard.stall_s += max(0.0, loop.time() - empty_s)
                empty_s = max(empty_s, loop.time()) + FRAME_S * len(item.codes)
    except Overloaded as error:
        heard.retry_after_s = error.retry_after_s
    return heard


async def offer(rates: list[tuple[float, float]], seed: int) -> list[list[Heard]]:
    """What became of Poisson arrivals, phase by phase of (rate, seconds)."""
    server, generator = SmallServer(seed), np.random.default_rng(seed)
    model, serving = SpeechModel(server, AdmissionSettings()), asyncio.create_task(server.run())
    phases: list[list[asyncio.Task[Heard]]] = []
    for rate, duration_s in rates:
        left_s, listening = duration_s, list[asyncio.Task[Heard]]()
        while (gap_s := generator.exponential(1 / rate)) < left_s:
            left_s -= gap_s
            await asyncio.sleep(gap_s)
            frames = int(12.5 * np.clip(generator.lognormal(np.log(1.5), 0.35), 0.8, 30))
            listening.append(asyncio.create_task(listen(model, frames)))
        await asyncio.sleep(left_s)
        phases.append(listening)
    heard = [await asyncio.gather(*listening) for listening in phases]
    serving.cancel()
    return heard


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    for module in (speech_models, admission_control):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
    yield loop
    loop.close()


def p95_s(heard: list[Heard]) -> float:
    return float(np.percentile([one.ttfb_s for one in heard if one.ttfb_s is not None], 95))


def good_share(heard: list[Heard]) -> float:
    return sum(one.is_good for one in heard) / len(heard)


@pytest.mark.parametrize("seed", [0, 1])
def test_twice_the_capacity_takes_nothing_from_those_who_are_let_in(loop: VirtualLoop, seed: int) -> None:
    phases = [(CAPACITY, 40.0), (2 * CAPACITY, 40.0), (CAPACITY, 10.0), (CAPACITY, 40.0)]
    before, during, _, after = loop.run_until_complete(offer(phases, seed))
    assert good_share(before) >= 0.9
    assert sum(one.is_good for one in during) >= sum(one.is_good for one in before)
    spoken = [one for one in during if one.ttfb_s is not None]
    assert len(spoken) + sum(one.retry_after_s > 0 for one in during) == len(during) > len(spoken)
    assert good_share(spoken) >= 0.8
    assert p95_s(during) <= 2 * p95_s(before)
    assert good_share(after) >= 0.85
    assert p95_s(after) <= 1.5 * p95_s(before)
