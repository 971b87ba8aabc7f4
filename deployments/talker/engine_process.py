"""The engine's own process: `python -m deployments.talker.engine_process FD`.

A busy Python thread beside the replica's event loop triples the time to the first byte; a child process costs nothing.
The process ends when its socket does, so it never outlives its replica, and it starts no session of its own.
"""

import logging
import select
import socket
import sys
import time

from deployments.errors import EngineError, TalkrayError
from deployments.model_store import locate
from deployments.protocol import ModelInfo
from deployments.talker.channel import (
    Abort,
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
from deployments.talker.engine import Engine

logger = logging.getLogger(__name__)

# How often an idle engine says that it is alive.
_HEARTBEAT_S = 0.5
_RECEIVE_BYTES = 1 << 20


class PipeClosedError(Exception):
    """The replica has gone; nobody is left to work for."""


class EngineProcess:
    """Commands from the socket to the engine, frames back."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unpacker = Unpacker()

    def run(self) -> None:
        """Load what `Start` names, then serve until the socket closes."""
        try:
            engine, info = self._load(self._await_start())
        except Exception as error:
            self._send(Failed(None, error))
            raise
        self._send(Ready(info))
        while True:
            self._serve_once(engine)

    def _serve_once(self, engine: Engine) -> None:
        for command in self._receive(timeout_s=_HEARTBEAT_S if engine.is_idle else 0.0):
            self._obey(engine, command)
        began_s = time.perf_counter()
        chunks = [(output.sequence_id, output.chunk) for output in engine.step()]
        step_s = time.perf_counter() - began_s if chunks else 0.0
        scheduler = engine.scheduler
        self._send(
            Produced(chunks, len(scheduler.running), len(scheduler.waiting), step_s, scheduler.blocks.used_ratio)
        )

    def _obey(self, engine: Engine, command: Command) -> None:
        if isinstance(command, Abort):
            engine.abort(command.id)
            return
        assert isinstance(command, Submit)
        try:
            engine.add(command.id, command.request)
        except TalkrayError as error:
            self._send(Failed(command.id, error))
        except Exception as error:  # a request that trips the engine must not take the other streams with it
            logger.exception("request %s could not be added", command.request.synthesis.request_id)
            self._send(Failed(command.id, EngineError(f"the engine failed on this request: {error!r}")))

    def _load(self, start: Start) -> tuple[Engine, ModelInfo]:
        self._send(Loading(f"looking for {start.model}"))
        directory = locate(start.model)
        self._send(Loading(f"loading the talker from {directory}"))
        engine = Engine(directory, start.config)
        self._send(
            Loading(f"talker on {engine.runner.device}, {engine.scheduler.blocks.num_blocks} KV blocks; warming up")
        )
        engine.warm_up()
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
        data = self.connection.recv(_RECEIVE_BYTES)
        if not data:
            raise PipeClosedError
        return [command for command in self.unpacker.feed(data) if isinstance(command, Start | Submit | Abort)]

    def _send(self, report: Report) -> None:
        try:
            self.connection.sendall(encode(report))
        except (BrokenPipeError, ConnectionResetError):
            raise PipeClosedError from None


def main(descriptor: int) -> None:
    """Serve on an inherited socket."""
    with socket.socket(fileno=descriptor) as connection:
        try:
            EngineProcess(connection).run()
        except PipeClosedError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
