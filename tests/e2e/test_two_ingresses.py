"""Requests of which an ingress replica that ends has answered nothing: another one answers them."""

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import HTTPConnection

import pytest

from serve_app.cli.ray_settings import free_port
from tests.e2e.black_box import users_environment
from tests.e2e.sockets import listeners, unread
from tools.suites.processes import MARK, marked, suspend

pytestmark = pytest.mark.faults
BOUND_S = 120
SERVER = """
import sys
from serve_app.config import AppConfig, PoolConfig
from tools.suites.application import running
ingress = PoolConfig(replicas=2, num_cpus=0.1, max_queued_requests=256)
with running(AppConfig(model="embedded", ingress_pool=ingress), int(sys.argv[1])):
    print("serving", flush=True)
    sys.stdin.read()
"""
HTTP_PORTS = range(30_000, 32_768)  # of Serve's replicas; Ray's own are above
SHORT = json.dumps({"input": "Hello.", "voice": "alloy", "response_format": "pcm", "max_new_tokens": 8}).encode()


@dataclass(frozen=True, slots=True)
class Service:
    proxy: str
    mark: str

    def ingresses(self) -> list[int]:
        return [process for process, command in marked(self.mark).items() if "ServeReplica:talkray:Ingress" in command]


def http_ports(replicas: list[int]) -> list[int]:
    """On which Serve's ingress replicas hear HAProxy."""
    return [listener.port for listener in listeners(replicas) if listener.port in HTTP_PORTS]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    port, mark = free_port(), uuid.uuid4().hex
    order, environment = [sys.executable, "-c", SERVER, str(port)], users_environment() | {MARK: mark}
    with subprocess.Popen(order, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "serving\n" in iter(process.stdout.readline, "")
        yield Service(f"http://127.0.0.1:{port}", mark)
        process.communicate(timeout=BOUND_S)
    assert marked(mark) == {}


def ask(connection: HTTPConnection, *, in_parts: bool) -> None:
    """For a short utterance. `in_parts`: with its body behind the head, as many clients send it."""
    connection.putrequest("POST", "/v1/audio/speech")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(len(SHORT)))
    if in_parts:
        connection.endheaders()
        time.sleep(0.05)
        connection.send(SHORT)
    else:
        connection.endheaders(SHORT)


def status(connection: HTTPConnection) -> int:
    """Of the answer, of which nothing is left to be read."""
    with connection.getresponse() as answer:
        answer.read()
        return answer.status


def test_what_a_replica_has_not_answered_another_one_answers(service: Service) -> None:
    with ExitStack() as opened:
        front = service.proxy.removeprefix("http://")
        connections = [opened.enter_context(closing(HTTPConnection(front, timeout=60))) for _ in range(8)]
        for connection in connections:
            ask(connection, in_parts=False)
        assert [status(connection) for connection in connections] == 8 * [200]
        victim = service.ingresses()[0]
        [port] = http_ports([victim])
        suspend(victim, BOUND_S)
        for number, connection in enumerate(connections):
            ask(connection, in_parts=number % 4 > 1)
        answered, bound_s = 0, time.monotonic() + BOUND_S
        while answered + unread(port) < 8:
            assert time.monotonic() < bound_s, f"{answered} answered, {unread(port)} at the replica that stands still"
            answered = len(select.select([connection.sock for connection in connections], [], [], 0.1)[0])
        assert 0 < answered < 8
        os.kill(victim, signal.SIGKILL)
        assert [status(connection) for connection in connections] == 8 * [200]
