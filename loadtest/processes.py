"""Run the open loop in several client processes, because one process can keep up with only a few streams."""

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

START_DELAY_NS = 100_000_000  # long enough for every process to read the start time


class Stage(Enum):
    """Progress of a client process."""

    READY = "the process has warmed up"
    ENDED = "the process has finished its share"
    INTERRUPTED = "the process has ended early"


class ClientProcesses(Runner):
    """Runner that distributes its requests across several processes, which share the machine's clock."""

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
        """Process messages until the next stage. Re-raises an exception from the process."""
        while True:
            match await receive(connection):
                case Exception() as error:
                    raise error
                case Stage() as stage:
                    return stage
                case float() | Trace() as event:
                    self.note(event)


class Worker(Runner):
    """Runner for one process's share. It sends each event to the parent process, which displays the progress."""

    connection: Connection

    def note(self, event: float | Trace) -> None:
        """Send the event to the parent process. The worker does not store events."""
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
        gc.freeze()  # a full garbage collection of all imported objects would delay requests by tens of milliseconds
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

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the event loop handles it
    with contextlib.suppress(BrokenPipeError):  # the parent process has exited
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
