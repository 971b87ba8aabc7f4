"""With drivers that start nothing; tests/faults/test_ends.py has the real one."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.errors import StartError
from deployments.serving.reports import VARIABLE, report_stage
from serve_app.cli.serve import supervisor
from serve_app.cli.serve.local_server import Address
from serve_app.cli.serve.supervisor import ServerLost, Stopped, received, running
from serve_app.config import AppConfig

ADDRESS = Address("127.0.0.1", 1)
READY = """
import json, sys, time
order = json.loads(sys.stdin.readline())
def say(*event): print(json.dumps(event), flush=True)
say("stage", "starting Ray")
"""


@pytest.fixture(autouse=True)
def parent(servers_folder: Path) -> Path:
    return servers_folder


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A test leaves the signals as it found them."""
    before = [signal.getsignal(number) for number in supervisor._SIGNALS]
    yield
    assert [signal.getsignal(number) for number in supervisor._SIGNALS] == before


def driver(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(supervisor, "_DRIVER", ("-c", READY + code))


def test_a_start_is_reported_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch, parent: Path) -> None:
    driver(monkeypatch, "say('ready', ''); time.sleep(600)")
    stages: list[str] = []
    with running(AppConfig(), ADDRESS, stages.append) as server:
        assert server.url == "http://127.0.0.1:1"
        assert len([*parent.iterdir()]) == 1
    assert stages == ["starting Ray"]
    assert not list(parent.iterdir())


def test_what_replicas_report_is_shown_until_the_server_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = "pathlib.Path(order['folder'], 'seen')"
    code = "import pathlib; from deployments.serving.reports import report_stage; report_stage('loading')"
    code += f"\nwhile not {wait}.exists(): time.sleep(0.01)"
    driver(monkeypatch, f"{code}\nsay('ready', ''); time.sleep(600)")
    stages: list[str] = []

    def report(stage: str) -> None:
        stages.append(stage)
        if stage == "loading":
            (Path(os.environ[VARIABLE]).parent / "seen").touch()

    with running(AppConfig(), ADDRESS, report):
        assert "loading" in stages
        report_stage("another replica")
    assert "another replica" not in stages


def test_the_settings_reach_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, "from serve_app.config import AppConfig; say('failed', AppConfig(**order['config']).model)")
    with pytest.raises(StartError) as raised, running(AppConfig(model="mine"), ADDRESS, print):
        pass
    assert str(raised.value) == "mine"  # there are no logs yet


@pytest.mark.parametrize("event", ["failed", "lost"])
def test_of_a_start_that_fails_the_logs_are_kept(event: str, monkeypatch: pytest.MonkeyPatch, parent: Path) -> None:
    code = f"say('{event}', 'no weights'); say('ready', ''); time.sleep(600)"
    driver(monkeypatch, f"import os; os.mkdir(order['folder'] + '/ray'); {code}")
    with pytest.raises(StartError) as raised, running(AppConfig(), ADDRESS, print):
        pass
    [kept] = parent.iterdir()
    assert str(raised.value) == f"no weights\nLogs: {kept}"


def test_what_the_driver_said_last_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, "raise ValueError('odd')")
    with pytest.raises(StartError, match=r"the process that started Ray ended: ValueError: odd"):
        running(AppConfig(), ADDRESS, print).__enter__()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("say('lost', 'the raylet has gone')", "the raylet has gone"),
        ("os.abort()", "the process that started Ray was killed by signal 6"),
    ],
)
def test_a_server_that_is_lost_says_why(monkeypatch: pytest.MonkeyPatch, code: str, reason: str, parent: Path) -> None:
    driver(monkeypatch, f"import os; os.mkdir(order['folder'] + '/ray'); say('ready', ''); {code}")
    with pytest.raises(ServerLost, match=reason) as raised, running(AppConfig(), ADDRESS, print) as server:
        server.wait()
    [kept] = parent.iterdir()
    assert str(raised.value).endswith(f"\nLogs: {kept}")


def interrupt(number: signal.Signals, after_s: float) -> threading.Thread:
    """A signal to this process, more than once, as of somebody impatient."""

    def send() -> None:
        time.sleep(after_s)
        for _ in range(3):
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("number", "then"),
    [
        (signal.SIGINT, "time.sleep(600)"),
        (signal.SIGTERM, "time.sleep(600)"),
        (signal.SIGTERM, "sys.exit()"),  # it ends the driver too, which is no loss
    ],
)
def test_a_signal_ends_it_in_peace(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, then: str) -> None:
    driver(monkeypatch, f"say('ready', ''); {then}")
    stages: list[str] = []
    with running(AppConfig(), ADDRESS, stages.append) as server:
        sender = interrupt(number, 0.2)
        server.wait()
        sender.join()
    assert stages == ["starting Ray", "stopping"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_at_start_has_its_status(number: signal.Signals, monkeypatch: pytest.MonkeyPatch, parent: Path) -> None:
    driver(monkeypatch, "time.sleep(600)")
    sender = interrupt(number, 0.3)
    with pytest.raises(Stopped) as raised, running(AppConfig(), ADDRESS, print):
        pass
    sender.join()
    assert raised.value.code == 128 + number
    assert not list(parent.iterdir())


def test_stages_come_in_order_while_they_are_received(tmp_path: Path) -> None:
    stages = list[str]()
    with received(tmp_path, stages.append):
        assert Path(os.environ[VARIABLE]).parent == tmp_path
        for stage in ("loading", "two\nlines", "warm"):
            report_stage(stage)
    assert stages == ["loading", "two\nlines", "warm"]
    assert VARIABLE not in os.environ
