"""Four clients listen while others attack: `make hostile`. The attacks stand in `intruders.py`.

No listener may notice: each attack's longest wait for audio is compared with that of a minute without attackers. Hosts
with fewer than eight cores do not judge pauses and `/health`, because there the attackers take the listeners' cores. In
that minute ordinary clients take the attackers' place, because to share the engine is no attack. `TALKRAY_ATTACKS` is
an expression for the names of the attacks to run; `TALKRAY_MINUTE_S` is how long such a minute is.
"""

import asyncio
import gc
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Self

import aiohttp
import pytest
import torch

from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from tests.e2e.black_box import ServerCommand, create_key, serving
from tests.faults.held import held, kind_of
from tools.experiments.faults.intruder import PER_MINUTE, STREAMS
from tools.experiments.faults.intruders import ATTACKS, Attack, strike
from tools.experiments.faults.polite import BYTES_PER_S, SENTENCES, PoliteClient, Stream, body

pytestmark = pytest.mark.hostile

MINUTE_S = float(os.environ.get("TALKRAY_MINUTE_S", "60"))
WARM_ROUNDS = 2  # what a process keeps of a round grows in the second one, and not in the third
WAYS = ("HTTP", "WebSocket", "ElevenLabs", "Realtime")
BETWEEN_S = 0.4  # after a turn has been played, until the next one
CORES, LEAST_CORES = len(os.sched_getaffinity(0)), 8
NOTICED_S = 0.1  # that a listener may wait longer than in the minute without attackers
HEALTH_S = 0.2  # that an answer of /health may take
GROWTH = 0.05  # of a process's memory, from the warm-up to a minute after the attacks
NOISE_MIB = 4.0  # raylet, of 12 to 17 MiB, grows by up to 2.2 MiB in any ten minutes
MOST_MIB = 512.0  # that a process may have for the time of an attack, above what it had before
GUARD_MIB = 3072.0  # at which the run ends: the machine is needed by others
BAD = {"500", "502", "504", "closed 1011"}
TURN = body("Good morning, and thank you for calling.", "ryan")
NEIGHBOURS = 4  # ordinary clients in the minute without attackers
LONG_TURN = body(" ".join(3 * SENTENCES), "ryan")  # 1,200 characters, taken as fast as they are spoken
CONFIG = f"""
api:
  voices: {{{{store: {{store}}}}}}
  admission:
    client_requests_per_minute: {PER_MINUTE}
    trusted_proxies: 2    # clients say which address they have
    max_streams: {STREAMS}
    max_late_s: 100       # pauses are what is measured
    max_line_s: 5
talker:
  max_num_seqs: 16
  max_model_len: 1024
"""


def as_text(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def checkpoint(directory: Path) -> Path:
    """Tiny and random, with short turns, and a text that is read as the embedded voice's is."""
    shape = SHAPES["tiny-CustomVoice"].changed({"talkray": {"spoken_form": "english", "max_segment_chars": 300}})
    write_checkpoint(directory, replace(shape, eos_scale=4.5), Options(dtype=torch.float32))
    return directory


@dataclass(slots=True)
class Seen:
    """What listeners, probes and processes were like in some time."""

    name: str
    entry: int = 0
    many: int = 0
    pauses_s: dict[str, float] = field(default_factory=dict)  # the longest, by way
    health_s: float = 0.0
    peak_mib: float = 0.0  # by how much a process grew at most
    kept: str = ""  # the process that has most more behind it than before, and how much
    got: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)

    def worst_way(self, quiet: "Seen") -> str:
        """Whose listener waited longest, compared with the time without attackers."""
        return max(WAYS, key=lambda way: self.pauses_s.get(way, 0.0) - quiet.pauses_s[way])

    def row(self, quiet: "Seen") -> list[str]:
        acts = Counter[str]()
        for what, count in self.got.items():
            acts[what.partition(":")[0]] += count
        acts_text = "  ".join(f"{what}: {count}" for what, count in sorted(acts.items()) if what != "cut off")
        way = self.worst_way(quiet)
        both_s = self.pauses_s.get(way, 0.0), quiet.pauses_s[way]
        times = [f"{1000 * each:.0f}" for each in (*both_s, self.health_s)]
        number = str(self.entry) if self.many else ""
        verdict = "" if not self.many else "BROKEN" if self.missed else "holds"
        return [number, self.name, str(self.many or ""), *times, f"{self.peak_mib:.0f}", self.kept, verdict, acts_text]


HEAD = [
    *("entry", "attack", "intruders", "pause, ms", "without", "/health, ms", "peak, MiB", "kept, MiB"),
    *("limits", "what it got"),
]


class Watch:
    """Listeners, probes and the memory of each process, from the beginning of the block to its end."""

    def __init__(self, server: ServerCommand, keys: Sequence[str]) -> None:
        url = f"http://127.0.0.1:{server.port}"
        self._server = server
        self._clients = [
            PoliteClient(key, url, f"127.0.0.{100 + number}", way=way)
            for number, (way, key) in enumerate(zip(WAYS, keys, strict=True))
        ]
        self._url = url
        self._streams: list[Stream] = []
        self._health: list[tuple[float, float, object]] = []  # asked at, took, status
        self._memory: dict[int, float] = {}
        self._peaks: dict[int, float] = {}
        self.processes = self._kinds()
        self.overgrown: str | None = None

    def _kinds(self) -> dict[int, str]:
        return {process: kind_of(command) for process, command in self._server.processes().items()}

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        for client in self._clients:
            await self._stack.enter_async_context(client)
        works = [self._listen(client) for client in self._clients]
        self._tasks = [asyncio.create_task(work) for work in (*works, self._probe(), self._weigh())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def _listen(self, client: PoliteClient) -> None:
        while True:
            stream = await client.speak({**TURN, "seed": len(self._streams)})
            self._streams.append(stream)
            played_s = (stream.first_s or stream.ended_s) + stream.num_bytes / BYTES_PER_S
            await asyncio.sleep(max(0.0, played_s - time.monotonic()) + BETWEEN_S)

    async def _probe(self) -> None:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(self._url, timeout=timeout) as http:
            while True:
                asked_s, status = time.monotonic(), "none"
                with suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with http.get("/health") as answer:
                        await answer.read()
                        status = str(answer.status)
                self._health.append((asked_s, time.monotonic() - asked_s, status))
                await asyncio.sleep(0.1)

    async def _weigh(self) -> None:
        while True:
            for process, kind in self.processes.items():
                with suppress(OSError):
                    mebibytes = held(process, kind).mebibytes
                    self._memory[process] = mebibytes
                    self._peaks[process] = max(self._peaks.get(process, 0.0), mebibytes)
                    if mebibytes > GUARD_MIB and self.overgrown is None:
                        self.overgrown = f"{kind} has {mebibytes:.0f} MiB"
                        self._server.end()
            await asyncio.sleep(0.25)

    def memory(self) -> dict[int, float]:
        """MiB of each process now."""
        return dict(self._memory)

    def deaths(self) -> list[str]:
        """Processes that are gone; those in their place are watched from now on."""
        now = self._kinds()
        gone = [kind for process, kind in self.processes.items() if process not in now and kind != "other"]
        self.processes = now
        self._memory = {process: each for process, each in self._memory.items() if process in now}
        return gone

    def check(self) -> None:
        """Raises where a listener of ours failed by itself, or a process is too large."""
        assert self.overgrown is None, self.overgrown
        for task in self._tasks:
            if task.done():
                task.result()

    async def recovered(self, within_s: float = 20.0) -> None:
        """Return once each listener has been spoken to since now."""
        from_s = time.monotonic()
        while time.monotonic() < from_s + within_s:
            self.check()
            spoken = {stream.way for stream in self._streams if stream.began_s > from_s and stream.outcome == "whole"}
            if spoken >= set(WAYS):
                return
            await asyncio.sleep(0.1)

    def begin(self) -> None:
        """What is seen from now on counts."""
        self._from_s = time.monotonic()
        self._before, self._peaks = dict(self._memory), {}

    def seen(self, name: str, attack: Attack | None = None) -> Seen:
        entry, many = (attack.entry, attack.many) if attack else (0, 0)
        seen = Seen(name, entry, many)
        streams = [stream for stream in self._streams if stream.ended_s >= self._from_s]
        for way in WAYS:
            waits_s = [longest_s(stream) for stream in streams if stream.way == way]
            seen.pauses_s[way] = max(waits_s, default=time.monotonic() - self._from_s)
        health = [(took_s, status) for asked_s, took_s, status in self._health if asked_s + took_s >= self._from_s]
        seen.health_s = max((took_s for took_s, _ in health), default=time.monotonic() - self._from_s)
        growth = [peak - self._before.get(process, peak) for process, peak in self._peaks.items()]
        seen.peak_mib = max(growth, default=0.0)
        kept = {process: each - self._before.get(process, each) for process, each in self._memory.items()}
        most = max(kept, key=kept.__getitem__)
        seen.kept = f"{kept[most]:.0f} {self.processes.get(most, 'one that is gone')}"
        spared = ("whole", "refused") if attack and attack.takes_every_place else ("whole",)
        lost = Counter(
            f"{each.way} {each.outcome}: {each.detail[:80]}" for each in streams if each.outcome not in spared
        )
        seen.missed += [f"a listener, {count} times: {what}" for what, count in lost.items()]
        seen.missed += [f"/health: {status}" for status in {status for _, status in health} - {"200"}]
        seen.missed += [f"{kind} died" for kind in self.deaths()]
        return seen


@asynccontextmanager
async def neighbours(server: ServerCommand, keys: Sequence[str]) -> AsyncIterator[None]:
    """Ordinary clients speak at length, one utterance after the other, until the block ends."""
    url = f"http://127.0.0.1:{server.port}"

    async def speak(client: PoliteClient) -> None:
        while True:
            stream = await client.speak(LONG_TURN)
            assert stream.outcome == "whole", f"a neighbour over {stream.way}: {stream.outcome}, {stream.detail}"

    async with AsyncExitStack() as stack:
        clients = [
            PoliteClient(key, url, f"127.0.0.{150 + number}", way=WAYS[number % len(WAYS)])
            for number, key in enumerate(keys)
        ]
        for client in clients:
            await stack.enter_async_context(client)
        tasks = [asyncio.create_task(speak(client)) for client in clients]
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def longest_s(stream: Stream) -> float:
    """For how long its listener waited for audio at most."""
    if stream.first_s is None:
        return stream.ended_s - stream.began_s
    return max(stream.first_s - stream.began_s, stream.gap_s)


def judge(seen: Seen, quiet: Seen, attack: Attack, *, cores: int = CORES) -> None:
    """Add the limits that did not hold."""
    bad = [f"{count} times {what}" for what, count in seen.got.items() if what in BAD or what.startswith("broken")]
    seen.missed += bad
    other = {*seen.got} - {attack.gets, "cut off"} if attack.gets else ()
    seen.missed += [f"{seen.got[what]} times {what}, not {attack.gets}" for what in other]
    if attack.is_beside:
        return
    if cores >= LEAST_CORES and not attack.takes_every_place:
        way = seen.worst_way(quiet)
        pause_ms, quiet_ms = 1000 * seen.pauses_s[way], 1000 * quiet.pauses_s[way]
        if pause_ms > quiet_ms + 1000 * NOTICED_S:
            seen.missed.append(f"{way} waits {pause_ms:.0f} ms, {quiet_ms:.0f} when quiet")
    if cores >= LEAST_CORES and seen.health_s > max(HEALTH_S, quiet.health_s + NOTICED_S):
        seen.missed.append(f"/health takes {1000 * seen.health_s:.0f} ms, {1000 * quiet.health_s:.0f} when quiet")
    if seen.peak_mib > MOST_MIB:
        seen.missed.append(f"a process takes {seen.peak_mib:.0f} MiB more")


def growth(before: Mapping[int, float], after: Mapping[int, float], kinds: Mapping[int, str]) -> list[list[str]]:
    """Rows of processes: kind, MiB before and after, and whether that is too much more."""
    rows = []
    for process, kind in sorted(kinds.items(), key=lambda item: item[1]):
        if process in before and process in after:
            one, other = before[process], after[process]
            more = other - one
            verdict = "GROWN" if more > max(GROWTH * one, NOISE_MIB) else ""
            rows.append([kind, f"{one:.1f}", f"{other:.1f}", f"{100 * more / max(one, 0.1):+.1f} %", verdict])
    return rows


def stand_back() -> None:
    """Attackers have machines of their own: what they compute is to keep nobody here waiting."""
    os.setsid()  # Linux shares cores among sessions first: nice counts within one
    os.nice(19)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")


async def run(
    server: ServerCommand, polite: Sequence[str], others: Sequence[str], keys: tuple[str, str],
    attacks: Sequence[Attack],
) -> None:  # fmt: skip
    loop = asyncio.get_running_loop()
    apart = ProcessPoolExecutor(3, mp_context=get_context("spawn"), initializer=stand_back)

    async def struck(attack: Attack, within_s: float, many: int) -> Counter[str]:
        return await loop.run_in_executor(apart, strike, attack, server.port, keys, within_s, many)

    gc.collect()
    gc.freeze()  # else this process, in which the listeners are, waits for 0.6 s for what was imported
    with apart:
        async with Watch(server, polite) as watch:
            ordinary = [attack for attack in attacks if not attack.is_beside]
            watch.begin()
            for start in range(0, len(ordinary) * WARM_ROUNDS, 2):
                pair = [ordinary[number % len(ordinary)] for number in (start, start + 1)]
                await asyncio.gather(*(struck(each, each.window_s, each.many) for each in pair))
                watch.check()
            await watch.recovered()
            warm = replace(watch.seen("warm-up, two attacks at a time"), missed=[])
            watch.begin()
            async with neighbours(server, others):
                await asyncio.sleep(MINUTE_S)
                watch.check()
                quiet = watch.seen("a minute without attackers")
            await watch.recovered()
            before = watch.memory()
            rows = [warm, quiet]
            beside = {
                each.name: asyncio.create_task(struck(each, each.window_s, each.many))
                for each in attacks
                if each.is_beside
            }
            for attack in ordinary:
                watch.begin()
                got = await struck(attack, attack.window_s, attack.many)
                await watch.recovered()
                seen = watch.seen(attack.name, attack)
                seen.got = got
                judge(seen, quiet, attack)
                rows.append(seen)
                print(as_text([seen.row(quiet)]), flush=True)
            for attack in attacks:
                if attack.is_beside:
                    seen = Seen(attack.name, attack.entry, attack.many, got=await beside[attack.name])
                    judge(seen, quiet, attack)
                    rows.append(seen)
            watch.begin()
            await asyncio.sleep(MINUTE_S)
            watch.check()
            after = watch.memory()
            rows.append(watch.seen("a minute behind them"))
            weights = growth(before, after, watch.processes)
    if CORES < LEAST_CORES:
        print(f"\nno limits of pauses and of /health: {CORES} cores, of at least {LEAST_CORES}")
    print()
    print(as_text([HEAD, *(seen.row(quiet) for seen in rows)]))
    print()
    print(as_text([["process", "MiB, warm", "MiB, a minute behind", "growth", ""], *weights]))
    missed = [f"{seen.name}: {each}" for seen in rows for each in seen.missed]
    missed += [f"memory of {row[0]}: {row[1]} MiB, {row[2]} a minute behind the attacks" for row in weights if row[4]]
    if missed:
        pytest.fail("\n".join([f"{len(missed)} limits did not hold:", *missed]), pytrace=False)


def test_nobody_who_listens_notices_an_attack(tmp_path: Path) -> None:
    model, file, config = checkpoint(tmp_path / "tiny"), tmp_path / "keys.json", tmp_path / "talkray.yaml"
    config.write_text(CONFIG.format(store=tmp_path / "store"))
    polite = [create_key(file, f"listener-{number}") for number in range(len(WAYS))]
    others = [create_key(file, f"neighbour-{number}") for number in range(NEIGHBOURS)]
    keys = create_key(file, "mallory"), create_key(file, "bystander")
    attacks = [attack for attack in ATTACKS if re.search(os.environ.get("TALKRAY_ATTACKS", ""), attack.name)]
    options = ("--model", str(model), "--keys", str(file), "--config", str(config), "--quiet")
    with serving(tmp_path, *options) as server:
        asyncio.run(run(server, polite, others, keys, attacks))
