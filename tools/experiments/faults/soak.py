"""An hour of everything: `python -m tools.experiments.faults.soak --minutes 60 --kills 100`.

A server that a supervisor starts again whenever it ends; clients that behave, each with a key that is rotated, and one
request in twenty by a client that does not; kills of every kind of process. Reports what became of the streams, when
there was speech again, whether `/ready` was right, and what grew. Ends with 1 where anything is not as it must be.
"""

import argparse
import asyncio
import contextlib
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import aiohttp
import yaml

from serve_app.api.access.keys import create_key, revoke_keys
from serve_app.cli.ray_settings import free_port
from tests.e2e.raw import SPEECH
from tools.experiments.faults.intruder import SHORT
from tools.experiments.faults.intruders import intrude
from tools.experiments.faults.kills import ProgressLog
from tools.experiments.faults.polite import PoliteClient, Stream, catalogue, pause_s
from tools.experiments.faults.soak_report import (
    BACK_S,
    Probe,
    SoakKill,
    SoakRecords,
    Survey,
    as_markdown,
    as_text,
    back_s,
    blame,
    spoken,
    tables,
)
from tools.experiments.faults.supervised import COMMAND, KINDS, SPARED, VITAL, SupervisedServer

EVERY_S = 1.0
PROGRESS_S = 15.0
OVERLAP_S = 5.0  # for which the old key still works
SETTLED_S = 3.0  # between speech after one kill and the next kill
MILD_SHARE = 0.3  # of the kills come first and end no server, so that one lives for long
HOSTILE_SHARE = 0.05
QUIET_S = 60.0  # without kills, at the start and at the end (a tenth of a short run)


class Soak:
    """One run."""

    def __init__(self, options: argparse.Namespace, scratch: Path, supervisor: SupervisedServer, keys: Path) -> None:
        self.options, self.keys_file, self.supervisor = options, keys, supervisor
        self.url = f"http://127.0.0.1:{options.port}"
        self.records = SoakRecords(time.monotonic(), options.kills)
        self._chance = random.Random(options.seed)
        self._done = asyncio.Event()
        self._open: set[object] = set()
        self._threads = ThreadPoolExecutor(40)
        self._hostile: set[asyncio.Task[None]] = set()
        self._hostile_key = create_key(keys, "hostile")
        self._probe_key = create_key(keys, "probe")
        self._said = catalogue()
        self._expected: list[bytes] = []
        self.clients = [
            PoliteClient(
                f"polite-{number}",
                self._key(number),
                self.url,
                f"127.0.0.{100 + number}",
                way=("HTTP", "WebSocket")[number % 2],
            )
            for number in range(options.clients)
        ]
        self._tmp = scratch

    def say(self, line: str) -> None:
        """With the time since the start."""
        print(f"{time.monotonic() - self.records.began_s:6.0f} s: {line}", flush=True)

    def _key(self, number: int) -> str:
        return create_key(self.keys_file, f"polite-{number}")

    async def run(self) -> int:
        """From the first start to the tables."""
        records = self.records
        async with contextlib.AsyncExitStack() as stack:
            self._http = await stack.enter_async_context(
                aiohttp.ClientSession(self.url, connector=aiohttp.TCPConnector(force_close=True))
            )
            for client in self.clients:
                await stack.enter_async_context(client)
            await self._until_ready()
            await self._learn()
            records.began_s = time.monotonic()
            records.folders = (self._folders(), 0)
            until_s = records.began_s + 60 * self.options.minutes
            quiet_s = min(QUIET_S, 6 * self.options.minutes)
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._kept(each)) for each in (self._poll, self._probe, self._survey)]
                helpers += [group.create_task(self._kept(each)) for each in (self._rotate, self._tell)]
                speakers = [group.create_task(self._kept(partial(self._speak, each))) for each in self.clients]
                await asyncio.sleep(quiet_s)
                records.spans["start"] = (records.began_s + quiet_s / 2, time.monotonic())
                await self._kept(partial(self._kill, until_s - quiet_s - 30 * min(1.0, self.options.minutes / 10)))
                self.say("no more kills")
                await asyncio.sleep(max(quiet_s, until_s - time.monotonic()))
                records.spans["end"] = (time.monotonic() - quiet_s / 2, time.monotonic())
                self._done.set()
                await asyncio.wait(speakers)
                for helper in helpers:
                    helper.cancel()
        if self._hostile:
            await asyncio.wait(self._hostile)
        records.folders = (records.folders[0], self._folders())
        records.starts = list(self.supervisor.ended)
        for kill in records.kills:  # a long stream had not ended when it was asked for
            kill.back_s = back_s(kill, spoken(records), self.supervisor.started_s)
        if self.options.records:
            self.options.records.write_bytes(pickle.dumps(records))
        return report(records)

    async def _kept(self, work: Callable[[], Awaitable[None]]) -> None:
        """A fault of the soak itself is told, counts as one, and does not cost the hour."""
        while not self._done.is_set():
            try:
                await work()
                return
            except Exception as error:
                self.say(f"fault of the soak: {error!r}")
                traceback.print_exc()
                self.records.faults.append(repr(error))
                await asyncio.sleep(EVERY_S)

    def _folders(self) -> int:
        return len(list(self._tmp.glob("talkray-*")))

    async def _until_ready(self) -> None:
        began_s = time.monotonic()
        while await self._get("/ready") != 200:
            assert time.monotonic() < began_s + 300, f"it does not start:\n{self.supervisor.server.output}"
            await asyncio.sleep(0.25)
        self.say(f"ready after {time.monotonic() - began_s:.1f} s")

    async def _learn(self) -> None:
        """What each utterance is without kills."""
        client, began_s, audio, said = self.clients[0], time.monotonic(), 0, ProgressLog()
        for number, fields in enumerate(self._said):
            stream, pcm = await client.speak(number, fields, None)
            while stream.outcome == "refused":
                self.say(f"#{number} refused: {stream.detail}")
                await asyncio.sleep(1.0)
                stream, pcm = await client.speak(number, fields, None)
            assert stream.outcome == "whole", stream
            self._expected.append(pcm)
            said(f"learned {number + 1} of {len(self._said)} utterances")
            audio += len(pcm)
        took_s = time.monotonic() - began_s
        self.say(f"{len(self._said)} utterances, {audio / 48000:.0f} s of audio, learned in {took_s:.1f} s")

    async def _speak(self, client: PoliteClient) -> None:
        """One polite client, until the end."""
        number = self._chance.randrange(len(self._said))
        while not self._done.is_set():
            ticket = object()
            self._open.add(ticket)
            stream, pcm = await client.speak(number, self._said[number], self._expected[number])
            self._open.discard(ticket)
            self._note(stream)
            if stream.outcome in ("whole", "wrong") or stream.lost:
                number = self._chance.randrange(len(self._said))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s(stream, len(pcm), self._chance)):
                    await self._done.wait()

    def _note(self, stream: Stream) -> None:
        self.records.streams.append(stream)
        if stream.lost:
            whose = blame(stream, self.records.kills)
            self.say(
                f"lost ({whose}): {stream.way} {stream.client} #{stream.utterance}: {stream.outcome}, {stream.detail}"
            )
        # As many as make the share of what reaches the server.
        reached = sum(each.outcome != "unreached" for each in self.records.streams)
        while len(self.records.hostile) + len(self._hostile) < HOSTILE_SHARE / (1 - HOSTILE_SHARE) * reached:
            task = asyncio.create_task(self._intrude())
            self._hostile.add(task)
            task.add_done_callback(self._hostile.discard)

    async def _intrude(self) -> None:
        seen = await intrude(self.options.port, self._hostile_key, random.Random(self._chance.random()))
        if seen[1] not in ("ClientConnectorError", "ConnectionRefusedError"):  # nobody was there
            self.records.hostile.append(seen)

    async def _rotate(self) -> None:
        """One client's key each minute; the old one works a little longer, then no more."""
        number = 0
        async for _ in every(self.options.rotate_s):
            client = self.clients[number % len(self.clients)]
            number += 1
            old, client.key = client.key, await asyncio.to_thread(self._key, self.clients.index(client))
            await asyncio.sleep(OVERLAP_S)
            await asyncio.to_thread(revoke_keys, self.keys_file, old.split("-")[1])
            self.records.rotations += 1
            for key, wrong in ((old, 200), (client.key, 401)):
                if await self._get("/v1/models", key) == wrong:
                    self.records.key_faults.append(
                        f"rotation {number}: {wrong} for {'old' if key == old else 'new'} key"
                    )
                    self.say(self.records.key_faults[-1])

    async def _poll(self) -> None:
        async for at_s in every(EVERY_S):
            self.records.ready.append((at_s, await self._get("/ready")))

    async def _probe(self) -> None:
        async for asked_s in every(EVERY_S):
            before = await self._get("/ready")
            speech = await self._say_hello()
            answered_s = time.monotonic()
            probe = Probe(asked_s, answered_s, before, speech, await self._get("/ready"))
            self.records.probes.append(probe)
            if probe.before == probe.after == 200 and probe.speech not in (200, 429):
                self.say(f"ready, and speech got {probe.speech}")

    async def _survey(self) -> None:
        loop = asyncio.get_running_loop()
        async for at_s in every(EVERY_S):
            self.records.surveys.append(Survey(at_s, await loop.run_in_executor(self._threads, self.supervisor.survey)))

    async def _get(self, path: str, key: str = "") -> int | str:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with asyncio.timeout(5), self._http.get(path, headers=headers) as answer:
                await answer.read()
                return answer.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return type(error).__name__

    async def _say_hello(self) -> int | str:
        headers = {"Authorization": f"Bearer {self._probe_key}"}
        try:
            async with asyncio.timeout(60), self._http.post(SPEECH, json=SHORT, headers=headers) as answer:
                await answer.read()
                return answer.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return type(error).__name__

    async def _kill(self, until_s: float) -> None:
        """All kills, each after speech has come back from the one before."""
        queue, began_s = schedule(self.options.kills, self._chance), time.monotonic()
        pause = (until_s - began_s) / max(1, len(queue))
        for number in range(self.options.kills - len(self.records.kills)):
            await asyncio.sleep(max(0.0, began_s + number * pause - time.monotonic()))
            while not await self._kill_one(queue):
                if time.monotonic() > until_s:
                    return
                await asyncio.sleep(0.5)
            await self._recovered()

    async def _kill_one(self, queue: list[str]) -> bool:
        """The first kind of the queue that has a process now."""
        found = await asyncio.to_thread(self.supervisor.find)
        for kind in queue:
            if found.get(kind):
                queue.remove(kind)
                victim = self._chance.choice(found[kind])
                kill = SoakKill(kind, time.monotonic(), len(self._open))
                self.records.kills.append(kill)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, 9)
                if kind in VITAL and "first life" not in self.records.spans:
                    self.records.spans["first life"] = (kill.at_s - 30, kill.at_s)
                return True
        return False

    async def _recovered(self) -> None:
        """Return once it speaks again and every process that is replaced is there."""
        kill, told_s = self.records.kills[-1], time.monotonic()
        needed = {COMMAND, *KINDS} - {*SPARED}
        while True:
            await asyncio.sleep(0.5)
            if kill.back_s is None:
                kill.back_s = back_s(kill, spoken(self.records), self.supervisor.started_s)
            found = await asyncio.to_thread(self.supervisor.find)
            missing = {kind for kind in needed if not found.get(kind)}
            if kill.back_s is not None and not missing:
                break
            if time.monotonic() - told_s > 2 * BACK_S:
                self.say(f"after {kind_and_age(kill)} still missing: {sorted(missing)}, speech after {kill.back_s}")
                return
        number, after_s = len(self.records.kills), f"speech after {kill.back_s:.1f} s"
        self.say(f"killed {number}: {kill.kind}, {kill.open_streams} streams open, {after_s}")
        await asyncio.sleep(SETTLED_S)

    async def _tell(self) -> None:
        async for _ in every(PROGRESS_S):
            records = self.records
            blamed = Counter(blame(stream, records.kills) for stream in records.streams if stream.lost)
            outcomes = Counter(stream.outcome for stream in records.streams)
            latest = records.surveys[-1] if records.surveys else None
            self.say(
                f"{outcomes['whole']} whole, {outcomes['refused']} refused, {outcomes['unreached']} not reached, lost: "
                f"{blamed['ingress or proxy']} carrier, {blamed['server']} server, {blamed['other']} other; "
                f"{len(self._open)} open; {len(records.hostile)} hostile; {len(records.kills)} kills; "
                f"{latest.mebibytes if latest else 0:.0f} MiB, {latest.files if latest else 0} files; "
                f"load {os.getloadavg()[0]:.1f}"
            )


def report(records: SoakRecords) -> int:
    """Print the tables; 1 where a must was missed."""
    found, missed = tables(records)
    for rows in found:
        print(f"\n{as_text(rows)}")
    for rows in found:
        print(f"\n{as_markdown(rows)}")
    print("\nhostile clients:", dict(sorted(Counter(records.hostile).items())))
    details = Counter(f"{stream.outcome}: {stream.detail[:60]}" for stream in records.streams if stream.detail)
    for detail, count in details.most_common(30):
        print(f"  {count} x {detail}")
    print(f"\nmusts missed: {len(missed)}")
    for each in missed:
        print(f"  {each}")
    return min(1, len(missed))


def kind_and_age(kill: SoakKill) -> str:
    return f"{time.monotonic() - kill.at_s:.0f} s without {kill.kind}"


def schedule(kills: int, chance: random.Random) -> list[str]:
    """Every kind as often as any other; those that end the server later on."""
    kinds = [*KINDS, COMMAND]
    chance.shuffle(kinds)
    each = [kinds[number % len(kinds)] for number in range(kills)]
    mild, vital = [kind for kind in each if kind not in VITAL], [kind for kind in each if kind in VITAL]
    chance.shuffle(mild)
    early, rest = mild[: int(MILD_SHARE * kills)], [*mild[int(MILD_SHARE * kills) :], *vital]
    chance.shuffle(rest)
    return [*early, *rest]


async def every(interval_s: float) -> AsyncIterator[float]:
    """The time, so often; late rather than twice."""
    while True:
        at_s = time.monotonic()
        yield at_s
        await asyncio.sleep(max(0.0, at_s + interval_s - time.monotonic()))


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.experiments.faults.soak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--clients", type=int, default=3, help="polite ones, each with one stream at a time")
    parser.add_argument("--rotate-s", type=float, default=60, help="between two rotations of a key")
    parser.add_argument("--records", type=Path, help="a file for everything that was seen, pickled")
    parser.add_argument("--port", type=int, default=free_port())
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch, short_folder() as folder:
        keys = Path(scratch) / "keys.json"
        create_key(keys, "first")
        config = exact_config(Path(scratch))
        serve_options = ("--keys", str(keys), "--config", str(config), "--quiet")
        supervisor = SupervisedServer(Path(scratch), options.port, serve_options, folder)
        try:
            return asyncio.run(Soak(options, folder, supervisor, keys).run())
        finally:
            supervisor.stop()


def exact_config(folder: Path) -> Path:
    """The local server's, with a codec whose samples do not depend on the chunks in which it makes them."""
    config = yaml.safe_load(Path("cluster/serve/local.yaml").read_text(encoding="utf-8"))
    config["applications"][0]["args"]["codec"] = {"precision": "float32"}
    file = folder / "exact.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """For the server's own folders, in which paths of sockets have to fit."""
    folder = Path("/tmp") / f"s{os.urandom(2).hex()}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
