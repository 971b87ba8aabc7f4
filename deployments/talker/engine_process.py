"""The engine's own process: `python -m deployments.talker.engine_process FD`.

A busy Python thread beside the replica's event loop triples the time to the first byte; a child process costs nothing.
The process ends when its socket does, so it never outlives its replica, and it starts no session of its own.
"""

import contextlib
import gc
import logging
import os
import select
import socket
import sys
import threading
import time

from deployments.embedded import cache_directory
from deployments.errors import EngineError, TalkerLost, TalkrayError
from deployments.model_store import locate
from deployments.protocol import ModelInfo
from deployments.talker.channel import (
    Abort,
    Alive,
    Command,
    Failed,
    Loading,
    Produced,
    Ready,
    Report,
    Start,
    Submit,
    Unpacker,
    encode,
)
from deployments.talker.engine import Engine, load_engine
from deployments.talker.trails import Trails
from deployments.talker.watchdog import Watchdog

logger = logging.getLogger(__name__)

_RECEIVE_BYTES = 1 << 20


class PipeClosedError(Exception):
    """The replica has gone; nobody is left to work for."""


class EngineProcess:
    """Commands from the socket to the engine, frames back."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unpacker = Unpacker()
        self.trails = Trails()
        self.spoilt: set[int] = set()  # sequences that came to NaN, ever
        self._sending = threading.Lock()  # the watchdog sends too

    def run(self) -> None:
        """Load what `Start` names, then serve until the socket closes."""
        try:
            engine, info = self._load(self._await_start())
        except Exception as error:
            self._send(Failed(None, error))
            raise
        self._send(Ready(info))
        watchdog = Watchdog(engine.runner.device.type, self._say_alive)
        with watchdog.running():
            while True:
                self._serve_once(engine, watchdog)

    def _serve_once(self, engine: Engine, watchdog: Watchdog) -> None:
        was_idle = engine.is_idle
        commands = self._receive(timeout_s=None if was_idle else engine.patience_s)
        with watchdog.step():
            self._obey_all(engine, commands)
            began_s = time.perf_counter()
            outputs = engine.step(meanwhile=lambda: self._obey_all(engine, self._receive(timeout_s=0)))
            chunks = [(output.sequence_id, output.chunk) for output in outputs]
            chunks = self.trails.follow(chunks)
            step_s = time.perf_counter() - began_s if chunks else 0.0
            spoilt, failed = engine.take_spoilt(), engine.take_failed()
        if chunks or was_idle or engine.is_idle:  # the last word before a pause says that nothing runs
            scheduler = engine.scheduler
            used_ratio = scheduler.blocks.used_ratio
            speakers = engine.prompts.speakers.take_lookups()
            self._send(Produced(chunks, len(scheduler.running), len(scheduler.waiting), step_s, used_ratio, speakers))
        for number, error in failed:
            self._send(Failed(number, error))
        self._send_away(engine, spoilt)

    def _send_away(self, engine: Engine, spoilt: list[int]) -> None:
        """Other talkers may go on with sequences whose state is no number; raises once that has struck two of them."""
        self.spoilt |= set(spoilt)
        if len(self.spoilt) > 1:
            raise EngineError(f"sequences {sorted(self.spoilt)} came to NaN or infinity")
        for number in spoilt:
            engine.abort(number)
            self._send(Failed(number, TalkerLost("the stream came to NaN or infinity on this talker")))

    def _obey_all(self, engine: Engine, commands: list[Command]) -> None:
        for command in commands:
            self._obey(engine, command)

    def _obey(self, engine: Engine, command: Command) -> None:
        if isinstance(command, Abort):
            engine.abort(command.id)
            self.trails.end(command.id)
            return
        assert isinstance(command, Submit)
        try:
            with self.trails.begin(command.id, command.request):
                engine.add(command.id, command.request)
        except TalkrayError as error:
            self._send(Failed(command.id, error))
        except Exception as error:  # a request that trips the engine must not take the other streams with it
            logger.exception("request %s could not be added", command.request.synthesis.request_id)
            self._send(Failed(command.id, EngineError(f"the engine failed on this request: {error!r}")))

    def _load(self, start: Start) -> tuple[Engine, ModelInfo]:
        self._send(Loading(f"looking for {start.model}"))
        directory = locate(start.model)
        engine = load_engine(directory, start.config, lambda stage: self._send(Loading(stage)))
        blocks = engine.scheduler.blocks.num_blocks
        self._send(Loading(f"{engine.runner.step.name} on {engine.runner.device}, {blocks} KV blocks"))
        self._send(Loading(engine.clock.summary()))
        gc.collect()
        gc.freeze()  # what is there now stays: looking at it again would take longer than a step
        return engine, engine.describe(start.model)

    def _await_start(self) -> Start:
        commands = self._receive(timeout_s=None)
        while not commands:
            commands = self._receive(timeout_s=None)
        (start,) = commands
        assert isinstance(start, Start)
        return start

    def _receive(self, *, timeout_s: float | None) -> list[Command]:
        """The commands that have arrived, waiting at most `timeout_s` for more bytes."""
        readable, _, _ = select.select([self.connection], [], [], timeout_s)
        if not readable:
            return []
        try:
            data = self.connection.recv(_RECEIVE_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise PipeClosedError
        return [command for command in self.unpacker.feed(data) if isinstance(command, Start | Submit | Abort)]

    def _say_alive(self) -> None:
        with contextlib.suppress(PipeClosedError):  # the engine's thread notices by itself
            self._send(Alive())

    def _send(self, report: Report) -> None:
        try:
            with self._sending:
                self.connection.sendall(encode(report))
        except (BrokenPipeError, ConnectionResetError):
            raise PipeClosedError from None


def main(descriptor: int) -> None:
    """Serve on an inherited socket."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory() / "triton"))  # compiled kernels outlive the process
    with socket.socket(fileno=descriptor) as connection:
        try:
            EngineProcess(connection).run()
        except PipeClosedError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
