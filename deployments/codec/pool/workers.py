"""A replica's decoding threads and processes, with detection of hangs and replacement of dead processes.

Decoding consists of hundreds of short Python steps, so threads in one process wait for each other and block the event
loop. On sixteen cores, two replicas with seven threads produced 27 seconds of audio per second; seven replicas with two
threads produced 63. This module also defines the messages between the processes.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from deployments.codec.batch import Decoded, DecodeTask, out_of_memory
from deployments.codec.decoder import CodecDecoder, WarmUpResult
from deployments.codec.decoder_state import Cell, DecoderState
from deployments.codec.pool.shared_states import SharedStates
from deployments.errors import CodecLost, EngineError
from deployments.protocol import Codes
from deployments.serving.processes import ThreadWork

logger = logging.getLogger(__name__)

_CHECK_S = 0.25
# A decoding thread on a CPU is always busy. On a GPU it may have to wait, but calls are much shorter than this limit.
_LONGEST_IDLENESS_S = 1.25
_LONGEST_GPU_CALL_S = 1.5
_FORK_S = 10.0  # time within which a new worker must send its process id
_STOP_S = 5.0
# A multithreaded process must not fork.
_ALONE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
FORK = b"f"  # message that accompanies the socket of a new worker

SharedOutcome = tuple[NDArray[np.int16], int] | Exception  # the audio and the position after it, or the error
P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """Thread pool for calls. After one call hangs, all calls raise CodecLost, because Python cannot stop a thread."""

    def __init__(self, count: int, *, on_gpu: bool) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="codec")
        self._on_gpu = on_gpu
        self.hang = False

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call in a thread and return its result. Raises the call's exceptions, and CodecLost if it hangs."""
        watched = _Watched()
        running = asyncio.get_running_loop().run_in_executor(self._threads, watched.run, lambda: call(*args, **kwargs))
        while not running.done():
            if self.hang or watched.hangs(on_gpu=self._on_gpu):
                self.hang = True
                raise CodecLost("a decoder thread of this codec replica is hung")
            await asyncio.wait((running,), timeout=_CHECK_S)
        try:
            return running.result()
        except (MemoryError, RuntimeError) as error:
            raise out_of_memory(error) or error from error


class _Watched:
    """A call whose progress can be observed from another thread."""

    def __init__(self) -> None:
        self._work: ThreadWork | None = None  # set while the call runs
        self._began_s = 0.0

    def run(self, call: Callable[[], T]) -> T:
        self._began_s, self._work = time.monotonic(), ThreadWork()
        try:
            return call()
        finally:
            self._work = None

    def hangs(self, *, on_gpu: bool) -> bool:
        work, now_s = self._work, time.monotonic()
        if work is None:
            return False
        if on_gpu:
            return now_s - self._began_s > _LONGEST_GPU_CALL_S
        return work.idle_s(now_s) > _LONGEST_IDLENESS_S


@dataclass(frozen=True, slots=True)
class SharedTask:
    """DecodeTask whose current and next states are in shared memory."""

    codes: Codes
    position: int
    source: int | None  # cell that holds the current state; None at the beginning of a stream
    target: int  # cell for the next state
    state_only: bool
    followed_by: int


@dataclass(frozen=True, slots=True)
class SharedOutcomes:
    """Outcomes of a call's tasks, in order."""

    outcomes: list[SharedOutcome]
    repaired: int  # number of streams whose call was repeated in float32


@dataclass(frozen=True, slots=True)
class DecoderChoice:
    """Which decoder to load, and the shapes of its calls."""

    directory: str
    precision: str
    chunk_frames: tuple[int, ...]
    max_call_s: float


class WorkerProcesses:
    """Pool of `count` decoder processes, forked from one process that has loaded the weights. See worker_process.py.

    A process that dies or hangs is replaced, and another process repeats the call. Repeating a call is safe, because
    states are never written in place.
    """

    def __init__(self, count: int, decoder: CodecDecoder, choice: DecoderChoice) -> None:
        """Block until all processes can decode. Raises EngineError if the decoder cannot be loaded."""
        self._decoder, self._counting = decoder, threading.Lock()
        descriptor = os.memfd_create("talkray-states")
        self._states = SharedStates(decoder.initial_state(), descriptor)
        self._control, theirs = socket.socketpair()
        with theirs:
            numbers = [theirs.fileno(), descriptor]
            command = [sys.executable, "-m", "deployments.codec.pool.worker_process", *map(str, numbers)]
            self._first = subprocess.Popen(
                [*command, json.dumps(asdict(choice))], pass_fds=numbers, env={**os.environ, **_ALONE}
            )
        os.close(descriptor)
        self._idle: SimpleQueue[_WorkerProcess] = SimpleQueue()
        # Runs when this object is deleted or Python exits. In a reference cycle, connections would be closed twice.
        self.stop = weakref.finalize(self, _stop, self._control, self._first, self._idle)
        with ExitStack() as failed:
            failed.callback(self.stop)
            with self._control.makefile("rb") as lines:
                loaded = lines.readline()
            if not loaded:
                code = self._first.wait()
                raise EngineError(f"the decoder process exited with code {code} while loading; see its output")
            warm_up_result = json.loads(loaded)
            batches = {int(frames): most for frames, most in warm_up_result["largest_batches"].items()}
            self.warm_up_result = WarmUpResult(batches, warm_up_result["seconds_per_frame"])
            for _ in range(count):
                self._idle.put(self._fork())
            failed.pop_all()

    @property
    def is_broken(self) -> bool:
        """Whether the parent process has ended, so dead workers cannot be replaced."""
        return self._first.poll() is not None

    def decode(self, tasks: list[DecodeTask]) -> list[Decoded | Exception]:
        """Run `decode_batch` in a process. There can be as many concurrent calls as processes. Raises CodecLost."""
        cells = [self._states.acquire() for _ in tasks]
        copies: list[Cell] = []  # cells for states that were not in shared memory, held during this call
        shared = [self._shared(task, cell.number, copies) for task, cell in zip(tasks, cells, strict=True)]
        done = self._call(shared) or self._call(shared)
        if done is None:
            raise CodecLost("two decoder processes of this codec replica ended while decoding the same frames")
        with self._counting:
            self._decoder.repaired += done.repaired
        return [
            outcome if isinstance(outcome, Exception) else Decoded(outcome[0], DecoderState(outcome[1], (), cell))
            for outcome, cell in zip(done.outcomes, cells, strict=True)
        ]

    def _shared(self, task: DecodeTask, target: int, copies: list[Cell]) -> SharedTask:
        state, source = task.state, None
        if state.cell is not None:
            source = state.cell.number
        elif state is not self._decoder.initial_state():
            copies.append(self._states.acquire())
            source = copies[-1].number
            self._states.write(source, state.tensors)
        return SharedTask(task.codes, state.position, source, target, task.state_only, task.followed_by)

    def _call(self, tasks: list[SharedTask]) -> SharedOutcomes | None:
        """Return one worker's outcomes; None if the worker died."""
        worker = self._idle.get()
        try:
            outcomes = worker.call(tasks)
        except (EOFError, OSError):
            worker.close()
            self._idle.put(self._fork())
            return None
        self._idle.put(worker)
        return outcomes

    def _fork(self) -> "_WorkerProcess":
        ours, theirs = socket.socketpair()
        with suppress(OSError), theirs:
            socket.send_fds(self._control, [FORK], [theirs.fileno()])
        connection = Connection(ours.detach())
        with suppress(EOFError, OSError):
            if connection.poll(_FORK_S):
                return _WorkerProcess(connection, connection.recv())
        connection.close()
        raise CodecLost("the parent process of this codec replica's decoder processes has ended")


class _WorkerProcess:
    """A decoder process with the connection to it."""

    def __init__(self, connection: Connection, process: int) -> None:
        self._connection, self._process = connection, process

    def call(self, tasks: list[SharedTask]) -> SharedOutcomes:
        """Decode `tasks` in the process. Raises EOFError or OSError if the process died or was killed while hung."""
        self._connection.send(tasks)
        work = ThreadWork(self._process)
        while not self._connection.poll(_CHECK_S):
            if work.idle_s(time.monotonic()) > _LONGEST_IDLENESS_S:
                logger.error("a decoder process is hung and will be killed")
                os.kill(self._process, signal.SIGKILL)
        outcomes: SharedOutcomes = self._connection.recv()
        return outcomes

    def close(self) -> None:
        self._connection.close()


def _stop(control: socket.socket, first: "subprocess.Popen[bytes]", idle: "SimpleQueue[_WorkerProcess]") -> None:
    with suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)
    control.close()
    while not idle.empty():
        idle.get().close()
    try:
        first.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        first.kill()
        first.wait()
