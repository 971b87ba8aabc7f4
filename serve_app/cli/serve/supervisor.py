"""Supervision of a server in a separate process. However the server ends, no processes remain and its port is freed.

Two processes watch each other. The supervisor, which is the command's own process, does not import Ray, so no error in
Ray can end it. It receives the signals and kills all other processes. The driver starts Ray in its own session, so
neither Ctrl-C nor a signal to the command's process group reaches Ray before the supervisor. If the supervisor is
killed, the driver reads EOF on its standard input and cleans up. If both are killed together, the next start cleans up
(`run_folder`). There is no graceful shutdown: clients are disconnected in any case, and Ray's own shutdown waits for
parts that may have caused the failure.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

from deployments.errors import StartError, TalkrayError
from deployments.serving.reports import VARIABLE
from serve_app.api.request_record import Entry
from serve_app.cli.serve import request_log, run_folder
from serve_app.cli.serve.local_server import Address, Report
from serve_app.cli.serve.run_folder import RunFolder
from serve_app.config import AppConfig

_DRIVER = ("-m", "serve_app.cli.serve.driver")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# systemd signals all processes of a service, so the driver may end before the supervisor receives its signal.
_SAME_MOMENT_S = 0.5


class ServerLost(TalkrayError):
    """The server exited, or lost a process that it needs. The message names the process."""


class Stopped(SystemExit):
    """A signal ended this process."""


class Driver:
    """Process that runs `serve_app.cli.serve.driver`."""

    def __init__(self, config: AppConfig, address: Address, folder: RunFolder, report: Report) -> None:
        self.url = address.url
        self.folder, self._report = folder, report
        with folder.driver_log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *_DRIVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        order = {"config": config.model_dump(mode="json"), "host": address.host, "port": address.port}
        order["folder"] = str(folder.path)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the driver has ended, which `await_ready` reports
            self._process.stdin.write(f"{json.dumps(order)}\n")
            self._process.stdin.flush()

    def await_ready(self) -> None:
        """Return once the server is ready. Raises StartError."""
        for kind, text in self._events():
            if kind == "ready":
                return
            if kind != "stage":
                raise StartError(text)
            self._report(text)
        raise StartError(self._how_it_ended())

    def wait(self) -> None:
        """Return once the server should stop. Raises ServerLost."""
        try:
            _, lost = next(self._events(), ("", ""))
            time.sleep(_SAME_MOMENT_S)
            raise ServerLost(lost or self._how_it_ended())
        except Stopped:
            self._report("stopping")

    def _events(self) -> Iterator[tuple[str, str]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, text = json.loads(line)
            yield kind, text

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # Ray may keep the process alive
            self._process.wait(_SAME_MOMENT_S)
        status = self._process.returncode or 0
        how = f"was killed by signal {-status}" if status < 0 else "ended"
        last = self.folder.driver_log.read_text(errors="replace").strip().rpartition("\n")[2]
        return f"the process that started Ray {how}{last and f': {last}'}"

    def end(self) -> None:
        """Kill the driver and all processes that it started."""
        with self._process:
            self._process.kill()
        self.folder.end_processes()


@contextlib.contextmanager
def running(
    config: AppConfig, address: Address, report: Report, *, show: Callable[[Entry], None] | None = None
) -> Iterator[Driver]:
    """Start the application, yield once it is ready, then end all its processes. Raises StartError and ServerLost.

    `show` receives an entry for each finished request.
    """
    is_ready = threading.Event()

    def report_start(stage: str) -> None:
        if not is_ready.is_set():  # replicas that start later are not announced
            with contextlib.suppress(OSError):
                report(stage)

    with _ended_by_signals(), run_folder.created(report) as folder, received(folder.path, report_start):
        driver = Driver(config, address, folder, report)
        try:
            driver.await_ready()
            is_ready.set()
            with request_log.followed(folder.ray, show) if show else contextlib.nullcontext():
                yield driver
        except (StartError, ServerLost) as error:
            driver.end()
            logs = folder.keep_logs()
            raise type(error)(f"{error}\nLogs: {logs}" if logs else str(error)) from None
        finally:
            driver.end()
            folder.remove()


@contextlib.contextmanager
def received(folder: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Pass the startup stages of all replicas to `report` on a separate thread while the context is open.

    The pipe is in `folder`, which only this user may enter.
    """
    pipe = folder / "reports"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDWR), encoding="utf-8") as lines:  # also open for writing, so reads never return EOF
        reader = threading.Thread(target=_read, args=(lines, report), daemon=True)
        reader.start()
        os.environ[VARIABLE] = str(pipe)
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            os.write(lines.fileno(), b"\n")
            reader.join()


def _read(lines: Iterable[str], report: Callable[[str], None]) -> None:
    """Pass lines to `report` until an empty line arrives."""
    for line in itertools.takewhile(lambda line: line != "\n", lines):
        report(json.loads(line))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise Stopped at the first signal, regardless of what this process is doing. Later signals are ignored."""

    def stop(number: int, _: FrameType | None) -> None:
        for later in _SIGNALS:
            signal.signal(later, signal.SIG_IGN)
        if number == signal.SIGHUP:  # the terminal is gone, so further output would fail
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.dup2(nowhere, sys.stderr.fileno())
        raise Stopped(128 + number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:  # nohup
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
