import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from serve_app.config import AppConfig
from serve_app.local_server import Address, _end_proxy, running, wait_for_stop
from serve_app.ports import free_port, why_unusable
from serve_app.rollout import root_cause
from serve_app.start_error import StartError

QUOTED = """A replica failed to start with exception. Retrying 2 more time(s). Error:
\x1b[36mray::ServeReplica:talkray:Talker.initialize_and_get_metadata()\x1b[39m (pid=1, ip=192.0.2.2)
  File "replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "engine_client.py", line 105, in _await_ready
    raise report.error
deployments.errors.CheckpointError: /m/model.safetensors does not fit: a is missing;
b is missing"""


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_free_port_can_be_used() -> None:
    assert why_unusable("127.0.0.1", free_port()) is None


def test_a_taken_port_cannot(listener: int) -> None:
    assert why_unusable("127.0.0.1", listener) == "Address already in use"


def test_nothing_is_started_for_a_taken_port(listener: int) -> None:
    stages: list[str] = []
    with (
        pytest.raises(StartError, match=f"{listener} cannot be used"),
        running(AppConfig(), Address("127.0.0.1", listener), stages.append),
    ):
        pass
    assert stages == []


def test_the_root_cause_stands_at_the_end_of_what_serve_quotes() -> None:
    assert root_cause(QUOTED) == "/m/model.safetensors does not fit: a is missing;\nb is missing"


def test_a_message_without_a_traceback_is_its_own_cause() -> None:
    assert root_cause("The deployment failed to start.") == "The deployment failed to start."


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_waiting(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        sender = threading.Thread(target=_signal_once_handled, args=(number, before[number]))
        sender.start()
        wait_for_stop()
        sender.join()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _signal_once_handled(number: signal.Signals, unhandled: object) -> None:
    while signal.getsignal(signal.SIGHUP) is unhandled or signal.getsignal(number) is unhandled:
        pass
    for _ in range(50):  # an impatient Ctrl-C interrupts its own handler
        os.kill(os.getpid(), number)


def test_an_orphaned_proxy_of_this_node_is_ended() -> None:
    code = "print('up', flush=True); import time; time.sleep(600)"
    ours, other = (
        subprocess.Popen(
            [sys.executable, "-c", code, "haproxy", "-f", f"/x/{node}/haproxy.cfg"], stdout=subprocess.PIPE
        )
        for node in ("node-1", "node-2")
    )
    with ours, other:
        for process in (ours, other):
            assert process.stdout is not None
            process.stdout.readline()
        _end_proxy("node-1")
        assert ours.wait(10) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()
