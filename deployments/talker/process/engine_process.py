"""Engine process: `python -m deployments.talker.process.engine_process SOCKET START`.

A busy Python thread would share the GIL with the replica's event loop and triple the time to first byte, so the
engine runs in a child process. It exits when its socket closes, so it never outlives its replica, and it
stays in the replica's session. A watchdog thread sends heartbeats, and ends the process if a step hangs.
"""

import contextlib
import logging
import math
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, assert_never

from deployments.errors import EngineError, TalkrayError
from deployments.protocol import FrameChunk, Mark, ModelInfo, SynthesisRequest
from deployments.serving.processes import ThreadWork, freeze_loaded
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import StartClock, load_engine
from deployments.talker.process import channel
from deployments.weights.store import cache_directory, locate

if TYPE_CHECKING:  # only models that clone encode recordings
    from deployments.talker.runner.recording_encoder import Encoding

logger = logging.getLogger(__name__)

_PERIOD_S = 0.25
# A step on a GPU takes milliseconds. A step on a CPU may take longer, but it keeps a processor busy.
_LONGEST_STEP_S = {"cuda": 1.5, "cpu": 60.0}
_LONGEST_IDLENESS_S = 1.25
EXIT_CODE = 70
_RECEIVE_BYTES = 1 << 20
_REST_S = 0.005
_PREPARING_S = 0.0005  # interval at which an idle engine checks for prepared inputs
_MOST_UNSENT_BYTES = 1 << 26


class Watchdog:
    """Monitors the thread that constructs it."""

    def __init__(self, device_type: str, alive: Callable[[], None], *, give_up: Callable[[int], object]) -> None:
        """Create a watchdog that calls `alive` four times a second, and `give_up` with an exit status after a hang."""
        self._longest_step_s = _LONGEST_STEP_S.get(device_type, _LONGEST_STEP_S["cpu"])
        self._alive, self._give_up = alive, give_up
        self._work = ThreadWork()
        self._step_began_s: float | None = None
        self._ended = threading.Event()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return a context with a time limit. A nested context has a separate limit."""
        is_within = self._step_began_s is not None
        self._step_began_s = time.monotonic()
        try:
            yield
        finally:
            self._step_began_s = time.monotonic() if is_within else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which the watchdog thread runs."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            began_s, now_s = self._step_began_s, time.monotonic()
            idle_s = self._work.idle_s(now_s)
            if began_s is not None:
                self._judge(now_s - began_s, min(now_s - began_s, idle_s))
            self._alive()

    def _judge(self, step_s: float, idle_s: float) -> None:
        if step_s > self._longest_step_s or idle_s > _LONGEST_IDLENESS_S:
            logger.error("a step hangs: it has run for %.1f s, the last %.1f s idle; exiting", step_s, idle_s)
            self._give_up(EXIT_CODE)


@dataclass(slots=True)
class _MarkedRequest:
    marks: list[Mark]
    has_audio: bool  # whether the engine decodes audio; otherwise a codec replica decodes the codes

    def add(self, stage: str) -> None:
        self.marks.append((stage, time.time_ns()))


class FirstAudioMarks:
    """Marks for requests whose first audio has not yet left the engine process."""

    def __init__(self) -> None:
        self._requests: dict[int, _MarkedRequest] = {}

    def track(self, sequence_id: int, request: SynthesisRequest, *, arrival: Mark) -> None:
        """Track a request with marks whose prompt is built. `arrival` is the mark "to-engine", unless it exists."""
        if request.marks:
            marks = [*request.marks] if request.marks[-1][0] == arrival[0] else [*request.marks, arrival]
            marked = _MarkedRequest(marks, bool(request.gpu_frames))
            marked.add("prompt")
            self._requests[sequence_id] = marked

    def mark_first_audio(self, chunks: tuple[tuple[int, FrameChunk], ...]) -> tuple[tuple[int, FrameChunk], ...]:
        """Return `chunks` with marks added to the first audio of each tracked request."""
        if not self._requests:
            return chunks
        return tuple((sequence_id, self._follow(sequence_id, chunk)) for sequence_id, chunk in chunks)

    def end(self, sequence_id: int) -> None:
        self._requests.pop(sequence_id, None)

    def _follow(self, sequence_id: int, chunk: FrameChunk) -> FrameChunk:
        request = self._requests.get(sequence_id)
        if request is None:
            return chunk
        if len(chunk.codes) and request.marks[-1][0] != "codes":
            request.add("codes")
        if request.has_audio and not chunk.pcm and chunk.finish_reason is None:
            return chunk  # the audio will follow in a later chunk
        self.end(sequence_id)
        if request.has_audio:
            request.add("audio")
        return replace(chunk, marks=tuple(request.marks))


def take_load(engine: Engine) -> channel.EngineLoad:
    """Return the current load, including cache lookups since the last call."""
    scheduler, prompts = engine.scheduler, engine.prompts
    return channel.EngineLoad(
        num_running=scheduler.num_listeners,
        num_waiting=len(scheduler.waiting),
        kv_used_ratio=scheduler.kv_used_ratio,
        speakers=prompts.speakers.take_lookups(),
        references=prompts.references.take_lookups(),
        num_background=scheduler.num_background,
        repaired=engine.audio.repaired,
    )


@dataclass(slots=True)
class _Prepared:
    """A sequence's commands, beginning with its request, held until the request's inputs are prepared."""

    commands: list[channel.Command]
    tokenized: Future[None] | None
    encoding: "Encoding | None"

    @property
    def is_done(self) -> bool:
        is_tokenized = self.tokenized is None or self.tokenized.done()
        return is_tokenized and (self.encoding is None or self.encoding.is_done)


class InputPreparation:
    """Tokenizes long texts in a thread, and encodes recordings on a GPU, while the engine's steps continue.

    A sequence's commands wait until its inputs are prepared.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._waiting: dict[int, _Prepared] = {}  # by sequence id

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def ready_commands(self, commands: list[channel.Command]) -> list[channel.Command]:
        """Return the commands that can run now, in order within each sequence."""
        ready_commands = list[channel.Command]()
        for command in commands:
            sequence_id = None if isinstance(command, channel.Forget) else command.sequence_id
            if sequence_id in self._waiting:
                self._waiting[sequence_id].commands.append(command)
            elif isinstance(command, channel.Submit) and (prepared := self._begin(command)) is not None:
                self._waiting[command.sequence_id] = prepared
            else:
                ready_commands.append(command)
        for sequence_id, prepared in list(self._waiting.items()):
            aborted = [command for command in prepared.commands if isinstance(command, channel.Abort)]
            if aborted or prepared.is_done:
                ready_commands += aborted or self._end(prepared)
                if prepared.tokenized is not None:
                    prepared.tokenized.cancel()
                del self._waiting[sequence_id]
        return ready_commands

    def _begin(self, command: channel.Submit) -> _Prepared | None:
        """Start preparing a request's inputs. Returns None if no preparation is needed, or if the request is invalid.

        In the latter case, `Engine.add` raises the error again.
        """
        request, engine = command.request, self._engine
        texts = engine.input_processor.long_texts(request)
        try:
            engine.check_room(request)
            encoding = engine.prompts.start_encoding(request)
        except TalkrayError:
            return None
        if encoding is None and not texts:
            return None
        if encoding is not None and request.marks:
            command = replace(command, request=replace(request, marks=(*request.marks, _arrival())))
        tokenized = self._thread.submit(self._tokenize, texts) if texts else None
        return _Prepared([command], tokenized, encoding)

    def _end(self, prepared: _Prepared) -> list[channel.Command]:
        submit, *others = prepared.commands
        if prepared.encoding is None or not isinstance(submit, channel.Submit):
            return prepared.commands
        request = self._engine.prompts.encoded(submit.request, prepared.encoding)
        return [replace(submit, request=request), *others]

    def _tokenize(self, texts: list[str]) -> None:
        for text in texts:
            self._engine.prompts.tokenizer.encode_ahead(text)


def _arrival() -> Mark:
    return ("to-engine", time.time_ns())


class EngineProcess:
    """Main loop that passes commands from the socket to the engine, and sends frames back.

    Raises ConnectionError after the replica has closed the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unpacker = channel.Unpacker()
        self.first_audio_marks = FirstAudioMarks()
        self._sending = threading.Lock()  # the watchdog thread sends too
        self._unsent = bytearray()  # reports that have not yet fit in the socket

    def run(self, start: channel.EngineStart) -> None:
        """Load the model, then serve requests until the socket closes."""
        try:
            engine, info = self._load(start)
        except Exception as error:
            failure = error if isinstance(error, TalkrayError) else EngineError(f"the engine does not start: {error!r}")
            self._send(channel.RequestFailed(None, failure))  # only Talkray's errors are certain to unpickle
            raise
        self._send(channel.Ready(info))
        self._preparation = InputPreparation(engine)
        watchdog = Watchdog(engine.runner.device.type, self._send_heartbeat, give_up=os._exit)
        with watchdog.running():
            while True:
                self._serve_once(engine, watchdog)

    def _serve_once(self, engine: Engine, watchdog: Watchdog) -> None:
        was_idle = engine.is_idle
        waits_s = _PREPARING_S if self._preparation else None
        commands = self._receive(timeout_s=waits_s if was_idle else engine.poll_timeout_s)
        with watchdog.step():
            self._execute_all(engine, commands, watchdog)
            began_s = time.perf_counter()
            output = engine.step(meanwhile=lambda: self._execute_all(engine, self._receive(timeout_s=0), watchdog))
            chunks = self.first_audio_marks.mark_first_audio(output.chunks)
            step_s = time.perf_counter() - began_s if chunks else 0.0
        if chunks or was_idle or engine.is_idle:  # the last report before idling shows an empty batch
            self._send(channel.Produced(chunks, step_s, take_load(engine)))
        for sequence_id, error in output.failures:
            self._send(channel.RequestFailed(sequence_id, error))
        if engine.is_idle and not was_idle:
            engine.check_integrity()  # raises if a row or block is lost, so that the engine is replaced

    def _execute_all(self, engine: Engine, commands: list[channel.Command], watchdog: Watchdog) -> None:
        """Run commands, each with its own time limit, because several recordings may exceed the limit of a step."""
        for command in self._preparation.ready_commands(commands):
            with watchdog.step():
                self._execute(engine, command)

    def _execute(self, engine: Engine, command: channel.Command) -> None:
        if isinstance(command, channel.Forget):
            self._send(channel.HasForgotten(engine.forget(command.voices)))
            return
        sequence_id = command.sequence_id
        if isinstance(command, channel.Abort):
            engine.abort(sequence_id)
            self.first_audio_marks.end(sequence_id)
            return
        try:
            if isinstance(command, channel.Submit):
                arrival = _arrival()
                engine.add(sequence_id, command.request)
                self.first_audio_marks.track(sequence_id, command.request, arrival=arrival)
            elif isinstance(command, channel.Append):
                engine.append_text(sequence_id, command.text, is_last=command.is_last)
            else:
                assert_never(command)
        except TalkrayError as error:
            engine.abort(sequence_id)
            self._send(channel.RequestFailed(sequence_id, error))
        except Exception as error:  # other streams continue
            logger.exception("request %d could not be added", sequence_id)
            engine.abort(sequence_id)
            failure = EngineError(f"the engine failed on this request: {error!r}")
            self._send(channel.RequestFailed(sequence_id, failure))

    def _load(self, start: channel.EngineStart) -> tuple[Engine, ModelInfo]:
        self._send(channel.Loading(f"looking for {start.model}"))
        directory = locate(start.model, report=lambda line: self._send(channel.Loading(line)))
        clock = StartClock(lambda stage: self._send(channel.Loading(stage)))
        engine = load_engine(directory, start.config, clock, makes_audio=start.makes_audio)
        room = f"room for {engine.scheduler.blocks.capacity * engine.info.frame_s / 60:.0f} minutes of speech at once"
        self._send(channel.Loading(f"networks: {engine.runner.networks.name}; on {engine.runner.device}, {room}"))
        self._send(channel.Loading(clock.summary()))
        freeze_loaded()
        return engine, replace(engine.info, name=start.model)

    def _receive(self, *, timeout_s: float | None) -> list[channel.Command]:
        """Return the commands that have arrived. Waits at most `timeout_s` for data, and _REST_S for its remainder.

        A recording takes several reads, and the engine would otherwise run a step between two of them.
        """
        messages: list[channel.Command | channel.EngineEvent] = []
        until_s = math.inf
        while self._wait_for_data(timeout_s):
            data = self.connection.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the replica has closed the socket")
            messages += self.unpacker.feed(data)
            now_s = time.monotonic()
            until_s = min(until_s, now_s + _REST_S)
            timeout_s = until_s - now_s
            if not self.unpacker.is_inside or timeout_s <= 0:
                break
        return [command for command in messages if isinstance(command, channel.Command)]

    def _wait_for_data(self, timeout_s: float | None) -> bool:
        """Wait for data while sending unsent data. Returns whether data is available."""
        while True:
            waiting = [self.connection] if self._unsent else []
            readable, writable, _ = select.select([self.connection], waiting, [], timeout_s)
            if writable:
                with self._sending:
                    self._flush()
            if readable or not writable or timeout_s is not None:
                return bool(readable)

    def _send_heartbeat(self) -> None:
        with contextlib.suppress(ConnectionError):  # the engine's thread detects a closed socket itself
            self._send(channel.Heartbeat())

    def _send(self, report: channel.EngineEvent) -> None:
        """Send a report without blocking. Whatever does not fit in the socket is sent later."""
        with self._sending:
            self._unsent += channel.encode(report)
            self._flush()

    def _flush(self) -> None:
        """Send as much as the socket accepts immediately. Blocks if the replica has not read for a long time."""
        if len(self._unsent) > _MOST_UNSENT_BYTES:
            self.connection.sendall(self._unsent)
            self._unsent.clear()
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent, socket.MSG_DONTWAIT)]


def main(descriptor: int, start: str) -> None:
    """Run the process. `descriptor` is the socket to the replica, and `start` a `channel.EngineStart` as JSON."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory() / "triton"))  # reused by later processes
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(ConnectionError):
        EngineProcess(connection).run(channel.EngineStart.model_validate_json(start))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
