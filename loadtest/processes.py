"""The open loop in several client processes, because one process can read only so many streams without being late."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from enum import Enum
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from loadtest.arrivals import ScheduledRequest
from loadtest.runner import Runner
from loadtest.settings import Settings
from loadtest.traces import Clock, Trace, TraceFolder

START_DELAY_NS = 100_000_000  # enough for every process to read the start


class Stage(Enum):
    """The progress of a process."""

    READY = "it has warmed up"
    ENDED = "it has finished its share"
    INTERRUPTED = "it has ended early"


class ClientProcesses(Runner):
    """A run like `Runner`'s, with its requests distributed over processes. They share the machine's clock."""

    def __init__(self, settings: Settings, schedule: Sequence[ScheduledRequest], *, folder: TraceFolder) -> None:
        super().__init__(settings, schedule, folder=folder)
        self._processes: list[BaseProcess] = []

    async def run(self, warmup: Sequence[ScheduledRequest] = ()) -> bool:
        connections = [self._start(index, warmup) for index in range(self.settings.processes)]
        try:
            if {await self._stage(connection) for connection in connections} != {Stage.READY}:
                return False
            clock = self.clock = Clock(time.perf_counter_ns() + START_DELAY_NS)
            for connection in connections:
                connection.send(clock)
            async with self.watching(clock):
                return set(await asyncio.gather(*map(self._stage, connections))) == {Stage.ENDED}
        finally:
            for process in self._processes:
                process.kill()
                process.join()

    def interrupt(self) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)

    def _start(self, index: int, warmup: Sequence[ScheduledRequest]) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        count = self.settings.processes
        share = (self.schedule[index::count], warmup[index::count])
        process = context.Process(target=work, args=(theirs, self.settings, *share, self.folder), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        return ours

    async def _stage(self, connection: Connection) -> Stage:
        """Take messages up to the next stage of a process; raises the exception that the process raised."""
        while True:
            match await receive(connection):
                case Exception() as error:
                    raise error
                case Stage() as stage:
                    return stage
                case float() | Trace() as event:
                    self.note(event)


class Worker(Runner):
    """Runs the share of one process. The process that shows the progress gets each event."""

    connection: Connection

    def note(self, event: float | Trace) -> None:
        """Send the event to the process that shows the progress; nothing is kept here."""
        self.connection.send(event)


def work(
    connection: Connection,
    settings: Settings,
    schedule: Sequence[ScheduledRequest],
    warmup: Sequence[ScheduledRequest],
    folder: TraceFolder,
) -> None:
    async def begin() -> Clock:
        gc.collect()
        gc.freeze()  # a full collection would look at all that was imported: tens of ms in which nothing is sent
        connection.send(Stage.READY)
        clock = await receive(connection)
        assert isinstance(clock, Clock)
        return clock

    async def run() -> None:
        worker = Worker(settings, schedule, folder=folder, begin=begin)
        worker.connection = connection
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, worker.interrupt)
        try:
            connection.send(Stage.ENDED if await worker.run(warmup) else Stage.INTERRUPTED)
        except Exception as error:
            connection.send(error)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the loop can take it
    with contextlib.suppress(BrokenPipeError):  # the parent process is gone
        asyncio.run(run())


async def receive(connection: Connection) -> object:
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(connection.fileno())
    message: object = connection.recv()
    return message
