"""Clients of a fleet: streams over HTTP, several at once, in a thread of their own."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from tools.experiments.faults.polite import BYTES_PER_S, difference

SENTENCE = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "
_CHUNK_BYTES = 1 << 16
_LONG_S = 1200.0  # for anything
_NO_AUDIO_S = 300.0  # for the next audio, on a machine that is busy
SEEDS = 4  # different utterances


@dataclass(slots=True)
class Heard:
    url: str
    seed: int
    begun_s: float  # of time.monotonic()
    status: int = 0
    pcm: bytearray = field(default_factory=bytearray)
    arrivals_s: list[float] = field(default_factory=list)
    error: str | None = None
    ended_s: float = 0.0

    @property
    def longest_gap_s(self) -> float:
        """Between two arrivals of audio, or before the first."""
        return max((b - a for a, b in itertools.pairwise([self.begun_s, *self.arrivals_s])), default=0.0)


class Listeners:
    """Somebody who asks again and again, `at_once` streams at a time, each through the next of `urls`."""

    def __init__(
        self, urls: Sequence[str], key: str, *, at_once: int, sentences: int = 3, seeds: int = SEEDS,
        plays: bool = False,
    ) -> None:  # fmt: skip
        """`seeds`: different utterances. Who `plays` takes audio no faster than it sounds."""
        self.urls = list(urls)
        self._key, self._at_once, self._plays = key, at_once, plays
        self._text = SENTENCE * sentences
        self._seeds = itertools.cycle(range(seeds))
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="listeners")
        self.heard: list[Heard] = []  # that have ended
        self.under_way: list[Heard] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator["Listeners"]:
        """While they ask; at the end those that are under way are heard to their end."""
        self._thread.start()
        try:
            yield self
        finally:
            self._ending.set()
            self._thread.join()

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_NO_AUDIO_S)
        headers = {"authorization": f"Bearer {self._key}"}
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as session:
            await asyncio.gather(*(self._again_and_again(session, number) for number in range(self._at_once)))

    async def _again_and_again(self, session: aiohttp.ClientSession, number: int) -> None:
        for turn in itertools.count(number):
            if self._ending.is_set():
                return
            await self.listen(session, self.urls[turn % len(self.urls)], next(self._seeds))

    async def listen(self, session: aiohttp.ClientSession, url: str, seed: int) -> Heard:
        heard = Heard(url, seed, time.monotonic())
        self.under_way.append(heard)
        body = {"model": "qwen3-tts", "input": self._text, "voice": "alloy", "response_format": "pcm", "seed": seed}
        try:
            async with session.post(f"{url}/v1/audio/speech", json=body) as answer:
                heard.status = answer.status
                if answer.status != 200:
                    heard.error = f"{answer.status}: {(await answer.text())[:300]}"
                else:
                    await self._read(answer, heard)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            heard.error = f"{type(error).__name__}: {error}"
        heard.ended_s = time.monotonic()
        self.under_way.remove(heard)
        self.heard.append(heard)
        if heard.error:
            await asyncio.sleep(0.2)  # a door that is closed answers at once
        return heard

    async def _read(self, answer: aiohttp.ClientResponse, heard: Heard) -> None:
        started_s = time.monotonic()
        while chunk := await answer.content.read(_CHUNK_BYTES):
            heard.arrivals_s.append(time.monotonic())
            heard.pcm += chunk
            if self._plays:
                await asyncio.sleep(max(0.0, started_s + len(heard.pcm) / BYTES_PER_S - time.monotonic()))

    def wait_under_way(self, count: int) -> None:
        """Return once so many streams have brought audio and not ended."""
        self._wait(lambda: sum(bool(each.pcm) for each in self.under_way) >= count, f"{count} streams under way")

    def wait_heard(self, count: int) -> None:
        """Return once so many more have ended."""
        target = len(self.heard) + count
        self._wait(lambda: len(self.heard) >= target, f"{count} more streams to end")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        started_s = reported_s = time.monotonic()
        while not condition():
            now_s = time.monotonic()
            assert now_s - started_s < _LONG_S, f"{what}: {[each.error for each in self.heard]}"
            if now_s - reported_s > 10:
                seconds = sum(len(each.pcm) for each in [*self.heard, *self.under_way]) / BYTES_PER_S
                print(f"waiting for {what} ({now_s - started_s:.0f} s): {seconds:.0f} s of audio", flush=True)
                reported_s = now_s
            time.sleep(0.05)

    @property
    def failed(self) -> list[Heard]:
        """Those that did not come to a clean end."""
        return [each for each in self.heard if each.error]


def undisturbed(urls: Sequence[str], key: str, *, sentences: int = 3, seeds: int = SEEDS) -> dict[int, bytes]:
    """PCM of every seed while nothing happens."""
    listeners = Listeners(urls, key, at_once=min(2, seeds), sentences=sentences, seeds=seeds)
    with listeners.listening():
        listeners.wait_heard(seeds)
    assert [each.error for each in listeners.failed] == []
    return {each.seed: bytes(each.pcm) for each in listeners.heard}


def different(heard: Sequence[Heard], expected: dict[int, bytes]) -> list[str]:
    """What is not as it would be undisturbed: codes are equal, PCM may differ by 1 LSB."""
    problems = [(each.seed, each.error or difference(each.pcm, expected[each.seed])) for each in heard]
    return [f"seed {seed}: {problem}" for seed, problem in problems if problem]


def summary(heard: Sequence[Heard]) -> str:
    good = [each for each in heard if not each.error]
    gaps = sorted(each.longest_gap_s for each in good)
    seconds = sum(len(each.pcm) for each in good) / BYTES_PER_S
    longest = f"{gaps[-1]:.1f}" if gaps else "none"
    return f"{len(good)} of {len(heard)} streams whole, {seconds:.0f} s of audio, longest gap {longest} s"
