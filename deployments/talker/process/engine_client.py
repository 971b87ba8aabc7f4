"""The replica's client for the engine process: starts it, sends requests, and passes frames to streams."""

import asyncio
import contextlib
import itertools
import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from deployments.config import TalkerConfig
from deployments.errors import EngineError, TalkerLost
from deployments.gpu import asleep
from deployments.protocol import FrameChunk, Mailbox, ModelInfo, SynthesisRequest
from deployments.serving import mailbox, metrics
from deployments.serving.processes import any_runnable
from deployments.serving.reports import report_stage
from deployments.talker.process import channel
from deployments.weights.store import Report

logger = logging.getLogger(__name__)

_RECEIVE_BYTES = 1 << 18
_STOP_TIMEOUT_S = 5.0
# The engine process sends a heartbeat four times a second.
_PEER_TIMEOUT_S = 1.5
_LONGEST_PEER_TIMEOUT_S = 10.0  # if the process is waiting for a processor
_WATCH_S = 0.25
# Number of frames that a job segment sends together. Jobs have no listeners, and each chunk costs time on this event
# loop. Chunks larger than 100 kB would go through Ray's object store, which takes longer.
_BACKGROUND_FRAMES = 20
_CHUNKS_PER_TURN = 4  # of the event loop, which reads its sockets between turns

Item = FrameChunk | Exception


class ClaimedProcess:
    """An engine process that `talkray serve` started early, with the methods of `Popen` that are needed here."""

    def __init__(self, pid: int, descriptor: int) -> None:
        """`descriptor` is from `os.pidfd_open`, because the id may later belong to another process."""
        self.pid, self._descriptor = pid, descriptor

    def poll(self) -> int | None:
        """Return None while the process is running, then -1, because only its parent learns the exit code."""
        return -1 if select.select([self._descriptor], [], [], 0)[0] else None

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the process has ended. Raises TimeoutExpired."""
        if timeout_s is not None and not select.select([self._descriptor], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired("engine", timeout_s)
        select.select([self._descriptor], [], [])
        return -1

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._descriptor)


def _start_engine(start: channel.EngineStart) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    ours, theirs = socket.socketpair()
    with theirs:
        command = channel.engine_command(start, theirs.fileno())
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()])


def _claim_early_engine(start: channel.EngineStart) -> tuple[socket.socket, ClaimedProcess] | None:
    """Return the engine that `talkray serve` started early, if it is the one wanted and no replica has claimed it."""
    path = os.environ.get(channel.EARLY_ENGINE)
    if path is None:
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
        asking.connect(path)
        asking.sendall(f"{start.model_dump_json()}\n".encode())
        pid, descriptors, _, _ = socket.recv_fds(asking, 32, 1)
        if descriptors:
            with contextlib.ExitStack() as failed:
                engine = failed.enter_context(socket.socket(fileno=descriptors[0]))
                process = ClaimedProcess(int(pid), os.pidfd_open(int(pid)))
                failed.pop_all()
                return engine, process
    return None


class EngineClient:
    """Owns one engine process. The constructor blocks until the model is loaded."""

    def __init__(
        self, model: str, config: TalkerConfig, report: Report = report_stage, *, makes_audio: bool = True
    ) -> None:
        """Start the process. `report` receives each stage. `makes_audio` is False if all audio is decoded elsewhere."""
        self._report = report
        start = channel.EngineStart(model=model, config=config, makes_audio=makes_audio)
        self._process: subprocess.Popen[bytes] | ClaimedProcess
        self._socket, self._process = _claim_early_engine(start) or _start_engine(start)
        self._unpacker = channel.Unpacker()
        self._streams: dict[int, asyncio.Queue[Item]] = {}
        self._forgetting: deque[asyncio.Future[int]] = deque()  # in the order of the engine's replies
        self._sequence_ids = itertools.count()
        self._writer: asyncio.StreamWriter | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._reported_s = 0.0  # time.monotonic() of the last report
        self._keep_alive_s = config.keep_alive_s
        self._idle_since_s = time.monotonic()
        self._asleep, self._changing = False, asyncio.Lock()
        self.on_sleep: Callable[[bool], None] = lambda is_asleep: None  # called in another thread
        self.load = channel.EngineLoad()  # load after the last step
        with contextlib.ExitStack() as failed:
            failed.callback(self.stop)
            self.info = self._wait_until_ready()
            failed.pop_all()

    @property
    def is_alive(self) -> bool:
        """Whether the engine process is running and has reported recently."""
        return self._process.poll() is None and (self._reading is None or not self._reading.done())

    async def stream_frames(self, request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        """Yield frames as the engine makes them. Closing the generator aborts the request.

        Frames that arrive together form one chunk. A background request combines at least _BACKGROUND_FRAMES of them.
        Raises InvalidRequest or Overloaded before the first frame, and TalkerLost if the engine process dies.
        """
        await self.connect()
        sequence_id = next(self._sequence_ids)
        queue = self._streams[sequence_id] = asyncio.Queue()
        if self._keep_alive_s is not None:
            with contextlib.ExitStack() as failed:
                failed.callback(self._streams.pop, sequence_id)
                await asyncio.shield(self._wake())
                failed.pop_all()
        self._send(channel.Submit(sequence_id, request))
        mailed = request.mailbox
        least = _BACKGROUND_FRAMES if request.background else 0
        writing = None if mailed is None else asyncio.create_task(self._write(sequence_id, mailed))
        try:
            while True:
                chunk = await _next_chunk(queue, least)
                if chunk.finish_reason is not None:
                    del self._streams[sequence_id]
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            if writing is not None:
                writing.cancel()
            self._idle_since_s = time.monotonic()
            if self._streams.pop(sequence_id, None) is not None:
                self._send(channel.Abort(sequence_id))

    async def _write(self, sequence_id: int, mailed: Mailbox) -> None:
        """Send a live request's text to the engine as it arrives. The stream fails if the text cannot be read."""
        try:
            async with aclosing(mailbox.read(mailed)) as parts:
                async for part in parts:
                    self._send(channel.Append(sequence_id, part, is_last=False))
            self._send(channel.Append(sequence_id, "", is_last=True))
        except Exception as error:
            if sequence_id in self._streams:
                self._streams[sequence_id].put_nowait(error)

    async def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop the engine's results for `voices`. Returns the number of results dropped. Raises TalkerLost."""
        await self.connect()
        if self._keep_alive_s is not None:
            await asyncio.shield(self._wake())
        forgotten: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forgetting.append(forgotten)
        self._send(channel.Forget(voices))
        return await forgotten

    def stop(self) -> None:
        """Close the socket, which makes the process exit. Kill the process if it does not exit in time."""
        with contextlib.suppress(OSError):  # already disconnected
            self._socket.shutdown(socket.SHUT_RDWR)  # after only a close, uvloop would keep the descriptor open
        self._socket.close()
        if self._writer is not None:
            self._writer.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self) -> ModelInfo:
        while data := self._socket.recv(_RECEIVE_BYTES):
            for report in self._unpacker.feed(data):
                if isinstance(report, channel.Ready):
                    return report.info
                if isinstance(report, channel.Loading):
                    self._report(report.stage)
                if isinstance(report, channel.RequestFailed):
                    raise report.error
        raise TalkerLost(f"the engine process exited with code {self._process.wait()} during its start; see its output")

    async def connect(self) -> None:
        """Connect the socket to the event loop on the first call, because the constructor has no running loop.

        Raises TalkerLost if the engine process has died.
        """
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        await asyncio.shield(self._connecting)
        if self._reading is None or self._reading.done():
            raise self._lost()

    async def _connect(self) -> None:
        self._socket.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=_RECEIVE_BYTES)
        self._reported_s = time.monotonic()
        self._reading = asyncio.create_task(self._read(reader, self._writer))
        self._watching = asyncio.create_task(self._watch(self._reading))

    async def _watch(self, reading: asyncio.Task[None]) -> None:
        """Stop reading and fail all streams if the engine process sends nothing for too long."""
        while not reading.done():
            slept_s = time.monotonic()
            await asyncio.sleep(_WATCH_S)
            now_s = time.monotonic()
            if now_s - slept_s > 2 * _WATCH_S:
                self._reported_s = now_s  # this process was suspended, so the silence does not prove anything
            silence_s = now_s - self._reported_s
            if silence_s > _PEER_TIMEOUT_S and (
                silence_s > _LONGEST_PEER_TIMEOUT_S or not any_runnable(self._process.pid)
            ):
                logger.error("the engine process has been silent for %.1f s", silence_s)
                self._process.kill()
                reading.cancel()  # a process hung in a driver keeps its socket open even after being killed
            if self._streams or self._forgetting:
                self._idle_since_s = now_s
            elif self._keep_alive_s is not None and now_s - self._idle_since_s > self._keep_alive_s:
                await self._sleep()

    async def _sleep(self) -> None:
        """Release the GPU unless a request arrives first. After a driver error, the engine keeps the GPU for good."""
        async with self._changing:
            if self._asleep or self._streams:
                return
            try:
                await asyncio.to_thread(self._change, asleep.send_to_sleep, to_sleep=True)
            except EngineError as error:
                logger.error("the engine stays on its GPU: %s", error)
                self._keep_alive_s = None

    async def _wake(self) -> None:
        """Return once the engine has its GPU memory back. Raises TalkerLost if other processes are using the memory."""
        async with self._changing:
            if not self._asleep:
                return
            began_s = time.monotonic()
            try:
                await asyncio.to_thread(self._change, asleep.wake, to_sleep=False)
            except EngineError as error:
                self._process.kill()  # the suspended process cannot receive messages
                raise TalkerLost(f"the engine could not restore its GPU memory: {error}") from error
            self._idle_since_s = time.monotonic()
            logger.info("the engine is back on its GPU after %.2f s", time.monotonic() - began_s)

    def _change(self, change: Callable[[int], None], *, to_sleep: bool) -> None:
        change(self._process.pid)
        self._asleep = to_sleep
        self.on_sleep(to_sleep)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(_RECEIVE_BYTES):
                    self._reported_s = time.monotonic()
                    for report in self._unpacker.feed(data):
                        await self._handle_event(report)
        finally:
            for queue in self._streams.values():
                queue.put_nowait(self._lost())
            for forgotten in self._forgetting:
                if not forgotten.done():
                    forgotten.set_exception(self._lost())
            writer.close()  # while its event loop is still running

    async def _handle_event(self, report: channel.Command | channel.EngineEvent) -> None:
        if isinstance(report, channel.Produced):
            before, self.load = self.load, report.load
            load = self.load
            metrics.record_talker_step(report.step_s, len(report.chunks), load.kv_used_ratio, waiting=load.num_waiting)
            metrics.record_recording_lookups("speaker", self.load.speakers)
            metrics.record_recording_lookups("codes", self.load.references)
            metrics.REPAIRS.record(self.load.repaired - before.repaired, pool="talker")
            # The newest requests come first, because they wait for their first audio.
            newest_first = sorted(report.chunks, key=lambda each: -each[0])
            for number, (sequence_id, chunk) in enumerate(newest_first):
                if number and number % _CHUNKS_PER_TURN == 0:
                    await asyncio.sleep(0)
                if sequence_id in self._streams:
                    self._streams[sequence_id].put_nowait(chunk)
        elif isinstance(report, channel.RequestFailed) and report.sequence_id in self._streams:
            self._streams[report.sequence_id].put_nowait(report.error)
        elif isinstance(report, channel.HasForgotten) and not (forgotten := self._forgetting.popleft()).done():
            forgotten.set_result(report.num_results)

    def _send(self, command: channel.Command) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(channel.encode(command))

    def _lost(self) -> TalkerLost:
        reason = f"the engine process of this talker replica ended (code {self._process.poll()})"
        return TalkerLost(reason, max(0, len(self._streams) - 1))


async def _next_chunk(queue: "asyncio.Queue[Item]", least: int) -> FrameChunk:
    """Return one chunk with all frames that have arrived, at least `least` of them unless the stream ends.

    An error is raised only once all earlier frames have been returned.
    """
    chunks, num_frames = list[FrameChunk](), 0
    while not chunks or ((num_frames < least or not queue.empty()) and chunks[-1].finish_reason is None):
        item = await queue.get()
        if not isinstance(item, Exception):
            chunks.append(item)
            num_frames += len(item.codes)
        elif chunks:
            queue.put_nowait(item)
            break
        else:
            raise item
    return FrameChunk.join(chunks)
