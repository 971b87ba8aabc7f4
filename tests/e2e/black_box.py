"""A server as a command: signals, sockets and /proc only, so that any version of the command can be tried.

`TALKRAY_COMMAND` names another one than this environment's. Also a plugin of pytest, for the fixtures.
"""

import contextlib
import http.client
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from serve_app.cli.ray_settings import free_port
from tests.e2e import family
from tools.suites.raw import SPEECH, answered, ask

COMMAND = shlex.split(os.environ.get("TALKRAY_COMMAND", f"{sys.executable} -m serve_app"))
START_S = 240.0  # of a busy machine
# However a server ends, this long after it no process of it is left, and its port is free.
GONE_S = 10.0
# In the command lines of its processes.
GCS, RAYLET, HAPROXY = "gcs_server --log_dir", "raylet/raylet ", "bin/haproxy -db"
TALKER, INGRESS, MANAGER = "ServeReplica:talkray:Talker", "ServeReplica:talkray:Ingress", "HAProxyManager"
ENGINE = "deployments.talker.process.engine_process"
_POLL_S = 0.05
_BODY = {"model": "qwen3-tts", "input": "Hello.", "voice": "alloy", "response_format": "pcm", "max_new_tokens": 8}
ENDLESS = {"ignore_eos": True, "max_new_tokens": 3000}


def spoken_by(options: Sequence[str]) -> tuple[str, ...]:
    """The embedded voice, where `options` name no model."""
    return () if "--model" in options else ("--model", "embedded")


class ServerCommand:
    """`talkray serve` on a port, with everything it starts."""

    def __init__(
        self, scratch: Path, port: int, *options: str, terminal: bool = False, through: Sequence[str] = (),
        environment: Mapping[str, str | None] | None = None,
    ) -> None:  # fmt: skip
        """`options` are further ones of the command, `through` is put in front of it. `environment` is changed so;
        None removes.
        """
        self.port, self.scratch, self.url = port, scratch, f"http://127.0.0.1:{port}"
        self.key = ""  # which `speak` and `speaking` send
        self.output_file = scratch / f"output-{port}-{time.monotonic_ns()}"
        command = [*through, *COMMAND, "serve", *spoken_by(options), "--port", str(port), *options]
        own = users_environment(environment)
        self._family = subprocess.Popen(
            [sys.executable, family.__file__, str(self.output_file), *command],
            env=own | {family.TERMINAL: "1"} if terminal else own,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=scratch,
            start_new_session=True,  # Ctrl-C is for the tests, which end what it holds
        )  # fmt: skip
        assert self._family.stdout is not None
        self.pid = int(self._family.stdout.readline())
        self._ended = threading.Event()
        self.status: int | None = None
        self._watch = threading.Thread(target=self._await_end)
        self._watch.start()

    def _await_end(self) -> None:
        assert self._family.stdout is not None
        line = self._family.stdout.readline()
        if line:  # else a test has ended the whole family
            self.status = int(line)
            self._ended.set()

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def reach(self, line: str, within_s: float = START_S) -> None:
        until_s = time.monotonic() + within_s
        while line not in self.output:
            assert not self._ended.is_set(), f"it ended with {self.status} before {line!r}:\n{self.output}"
            assert time.monotonic() < until_s, f"no {line!r} after {within_s} s:\n{self.output}"
            time.sleep(_POLL_S)

    def ready(self) -> None:
        self.reach("Press Ctrl-C to stop.")

    def wait(self, within_s: float) -> int:
        """The exit status of the command, negative for a signal."""
        assert self._ended.wait(within_s), f"it lives after {within_s} s:\n{self.output}"
        assert self.status is not None
        return self.status

    def processes(self) -> dict[int, str]:
        """Command line of every living process that the command led to, itself included."""
        parents: dict[int, int] = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(process.name)] = int(parent)
        commands = {}
        for process_id in parents:
            above = process_id
            while above in parents and above != self._family.pid:
                above = parents[above]
            if above == self._family.pid != process_id:
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{process_id}/cmdline").read_bytes()
                    commands[process_id] = command.replace(b"\0", b" ").decode(errors="replace")
        return commands

    def find(self, title: str) -> list[int]:
        return sorted(process for process, command in self.processes().items() if title in command)

    def signal_process(self, number: int) -> None:
        os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """As Ctrl-C on a terminal, or `timeout`."""
        os.killpg(self.pid, number)

    def signal_all(self, number: int) -> None:
        """As systemd does: every process of the control group, whatever session it is in."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def close_terminal(self) -> None:
        assert self._family.stdin is not None
        self._family.stdin.write("\n")
        self._family.stdin.flush()

    def leaves_nothing(self, within_s: float = GONE_S) -> None:
        """Fail unless all processes are gone, and the port is free, so many seconds from now."""
        until_s = time.monotonic() + within_s
        while (left := self.processes()) or listens(self.port):
            if time.monotonic() > until_s:
                raise AssertionError(f"left: {left}; port taken: {listens(self.port)}\n{self.output}")
            time.sleep(_POLL_S)

    def get(self, path: str) -> int | str:
        return self._ask(path, None)

    def speak(self, **fields: object) -> int | str:
        return self._ask(SPEECH, {**_BODY, **fields})

    def _ask(self, path: str, fields: Mapping[str, object] | None) -> int | str:
        try:
            method = "GET" if fields is None else "POST"
            return ask(self.port, fields, operation=f"{method} {path}", headers=self._headers())[0]
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @contextlib.contextmanager
    def speaking(self) -> Iterator[http.client.HTTPResponse]:
        """An utterance of minutes, of which some has been heard."""
        with answered(self.port, {**_BODY, **ENDLESS}, headers=self._headers()) as answer:
            assert answer.status == 200
            assert answer.read(1)
            yield answer

    def end(self) -> None:
        """Kill whatever is left; a test's last act."""
        while left := self.processes():
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(_POLL_S)
        self._family.kill()
        self._watch.join()
        with self._family:  # closes its pipes
            pass


@contextlib.contextmanager
def starting(scratch: Path, *options: str, port: int | None = None, **how: Any) -> Iterator[ServerCommand]:
    """A server that starts, on a free port where none is given. Nothing of it is left at the end of the block."""
    server = ServerCommand(scratch, port or free_port(), *options, **how)
    try:
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def serving(scratch: Path, *options: str, **how: Any) -> Iterator[ServerCommand]:
    """As `starting`, once it speaks."""
    with starting(scratch, *options, **how) as server:
        server.ready()
        yield server


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def started(tmp_path: Path, port: int) -> Iterator[ServerCommand]:
    """A server that starts on `port`. Nothing of it is left at the end of the test."""
    with starting(tmp_path, port=port) as server:
        yield server


Way = Callable[[ServerCommand], None]
WAYS: dict[str, Way] = {
    "TERM to the process": lambda server: server.signal_process(signal.SIGTERM),
    "TERM to its group": lambda server: server.signal_group(signal.SIGTERM),
    "TERM to every process": lambda server: server.signal_all(signal.SIGTERM),
    "INT to its group": lambda server: server.signal_group(signal.SIGINT),
    "HUP to the process": lambda server: server.signal_process(signal.SIGHUP),
    "KILL to the process": lambda server: server.signal_process(signal.SIGKILL),
    "KILL to its group": lambda server: server.signal_group(signal.SIGKILL),
    "closed terminal": lambda server: server.close_terminal(),
}


def ends_while_it_speaks(server: ServerCommand, way: str) -> None:
    """Ended in one of these ways it leaves nothing."""
    with server.speaking():
        WAYS[way](server)
        server.leaves_nothing()
    assert server.wait(1) == (-signal.SIGKILL if way.startswith("KILL") else 0)


def sample(ask: Callable[[], int | str], seen: list[tuple[float, int | str]], until: threading.Event) -> None:
    while not until.is_set():
        asked_s = time.monotonic()
        seen.append((asked_s, ask()))
        until.wait(0.05)


class Sampled:
    """What clients get, several times a second, with the moment at which each asked."""

    def __init__(self, server: ServerCommand) -> None:
        self.speech: list[tuple[float, int | str]] = []
        self.ready: list[tuple[float, int | str]] = []
        self._until = threading.Event()
        asks = ((server.speak, self.speech), (lambda: server.get("/ready"), self.ready))
        several = (asks[0], *asks)  # a line of one would not be full
        self._threads = [threading.Thread(target=sample, args=(ask, seen, self._until)) for ask, seen in several]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._until.set()
        for thread in self._threads:
            thread.join()

    def answers(self) -> set[int | str]:
        return {answer for _, answer in (*self.speech, *self.ready)}

    def first_spoken(self, *, after_s: float) -> float:
        """When the first request was made, after a moment, that was spoken."""
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            for asked_s, answer in list(self.speech):
                if answer == 200 and asked_s > after_s:
                    return asked_s
            time.sleep(_POLL_S)
        raise AssertionError(f"nothing was spoken within a minute: {self.speech[-5:]}")


def speaks_again(scratch: Path, port: int, *options: str, environment: Mapping[str, str | None] | None = None) -> str:
    """A server comes up on the port, another one as under a supervisor, speaks and ends; what it printed."""
    with serving(scratch, *options, port=port, environment=environment) as server:
        assert server.speak() == 200
        server.signal_process(signal.SIGTERM)
        server.leaves_nothing()
        return server.output


def users_environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """A user's: without the settings, ports among them, of a Ray that serves other tests. None removes a variable."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TALKRAY_"))}
    return {name: value for name, value in {**own, **(changes or {})}.items() if value is not None}


def as_user(user: int) -> list[str]:
    """Put in front of a command: whose processes it has. They may read everything, since the code may be root's own."""
    may_read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *may_read]


def talkray(
    *arguments: str, through: Sequence[str] = (), environment: Mapping[str, str | None] | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*through, *COMMAND, *arguments], env=users_environment(environment), capture_output=True, text=True,
        timeout=START_S, check=False, cwd="/",
    )  # fmt: skip


def refusal(*options: str, through: Sequence[str] = (), environment: Mapping[str, str | None] | None = None) -> str:
    """What a server that does not start says why, in one message."""
    arguments = ["serve", *spoken_by(options), "--port", str(free_port()), *options]
    done = talkray(*arguments, through=through, environment=environment)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done.stderr


def create_key(file: Path, name: str, *limits: str) -> str:
    printed = talkray("key", "create", name, "--file", str(file), *limits).stdout
    return next(word for word in printed.split() if word.startswith("talkray-"))


def listens(port: int) -> bool:
    suffix = f":{port:04X}"
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return any(row[1].endswith(suffix) and row[3] == "0A" for row in rows)
