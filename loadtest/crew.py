"""The open loop in several processes: one process reads so many streams at a time, and no more, without being late."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from loadtest.clients import Target
from loadtest.replicas import ReplicaWatch
from loadtest.runner import Progress, Runner, watching
from loadtest.traces import Clock, RunFolder, ScheduledRequest, Trace

START_DELAY_NS = 100_000_000  # every process has read the start by then


@dataclass(frozen=True, slots=True)
class Ready:
    """A process has warmed up."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A process has sent a request, so late."""

    lag_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A process has finished its share; not all of it where it was interrupted."""

    whole: bool


Message = Ready | Sent | Trace | Ended | Exception


class Crew:
    """One run as `Runner` makes it, the requests dealt out to processes. They share one clock: the machine's."""

    def __init__(
        self,
        target: Target,
        schedule: Sequence[ScheduledRequest],
        *,
        folder: RunFolder,
        processes: int,
        watch: ReplicaWatch | None = None,
        duration_s: float = 0.0,
    ) -> None:
        self.target = target
        self.schedule = schedule
        self.folder = folder
        self.watch = watch
        self.traces: list[Trace] = []
        self.progress = Progress(planned=len(schedule), duration_s=duration_s)
        self._num_processes = processes
        self._processes: list[BaseProcess] = []

    async def run(self, warmup: Sequence[ScheduledRequest] = ()) -> bool:
        """As `Runner.run`; each process speaks its share of the `warmup` first."""
        connections = [self._start(index, warmup) for index in range(self._num_processes)]
        try:
            readiness = [await self._expect(connection, Ready) for connection in connections]
            if any(isinstance(message, Ended) for message in readiness):
                return False
            clock = self.progress.clock = Clock(time.perf_counter_ns() + START_DELAY_NS)
            for connection in connections:
                connection.send(clock)
            async with watching(self.watch, clock):
                ends = await asyncio.gather(*(self._expect(connection, Ended) for connection in connections))
            return all(isinstance(end, Ended) and end.whole for end in ends)
        finally:
            self._stop()

    def interrupt(self) -> None:
        """As `Runner.interrupt`."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)

    def _start(self, index: int, warmup: Sequence[ScheduledRequest]) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        share = Share(
            self.target,
            tuple(self.schedule[index :: self._num_processes]),
            tuple(warmup[index :: self._num_processes]),
            self.folder,
        )
        process = context.Process(target=work, args=(share, theirs), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        return ours

    async def _expect(self, connection: Connection, kind: type[Ready] | type[Ended]) -> Message:
        """Take messages up to one of this kind, or the end; raises what a process raised."""
        while True:
            message = await receive(connection)
            if isinstance(message, Exception):
                raise message
            if isinstance(message, Sent):
                self.progress.send(message.lag_s)
            elif isinstance(message, Trace):
                self.traces.append(message)
                self.progress.finish(message)
            if isinstance(message, (Ended, kind)):
                return message

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@dataclass(frozen=True, slots=True)
class Share:
    """What one process does."""

    target: Target
    schedule: tuple[ScheduledRequest, ...]
    warmup: tuple[ScheduledRequest, ...]
    folder: RunFolder


class ReportingProgress(Progress):
    """Progress that is told to the process which shows it."""

    def __init__(self, planned: int, connection: Connection) -> None:
        super().__init__(planned)
        self._connection = connection

    def send(self, lag_s: float) -> None:
        """Count one request that leaves now."""
        super().send(lag_s)
        self._connection.send(Sent(lag_s))

    def finish(self, trace: Trace) -> None:
        """Count one finished request."""
        super().finish(trace)
        self._connection.send(trace)


def work(share: Share, connection: Connection) -> None:
    """The life of one process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the loop can take it
    with contextlib.suppress(BrokenPipeError):  # who started this process is gone
        asyncio.run(_work(share, connection))


async def _work(share: Share, connection: Connection) -> None:
    async def begin() -> Clock:
        connection.send(Ready())
        clock = await receive(connection)
        assert isinstance(clock, Clock)
        return clock

    runner = Runner(share.target, share.schedule, folder=share.folder, begin=begin)
    runner.progress = ReportingProgress(len(share.schedule), connection)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, runner.interrupt)
    try:
        connection.send(Ended(await runner.run(share.warmup)))
    except Exception as error:
        connection.send(error)


async def receive(connection: Connection) -> object:
    """The next message of a pipe."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(connection.fileno())
    message: object = connection.recv()
    return message
