"""Real HAProxy in front of processes that answer as an ingress replica does, and that some requests end."""

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from itertools import product
from pathlib import Path

import pytest

from serve_app.cli.ray_settings import TUNED, free_ports
from tests.e2e.sockets import unread
from tests.serve_app.proxy.test_guarded_haproxy import HAPROXY, SCRIPT
from tools.suites.processes import suspend
from tools.suites.raw import connected

NUM_REPLICAS = 3
BOUND_S = 60.0
# Answers `/` with its body once all of it is there, and `/parts` without a length. `/poison` ends it, whether as a
# request or as a handshake.
REPLICA = """
import asyncio, os, sys
import uvicorn
from serve_app.api.early_status import EarlyStatusProtocol

async def app(scope, receive, send):
    if scope["path"] == "/poison":
        await asyncio.sleep(0.1)
        os._exit(9)
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    if scope["path"] == "/parts":
        await send({"type": "http.response.start", "status": 200})
        for part in (b"RIFF", b"", b"data: 1", b"end"):
            await send({"type": "http.response.body", "body": part, "more_body": part != b"end"})
        return
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})

uvicorn.run(app, port=int(sys.argv[1]), http=EarlyStatusProtocol, ws="websockets-sansio", lifespan="off",
            log_level="error")
"""


@dataclass(frozen=True, slots=True)
class Front:
    """HAProxy, and the replicas behind it by their ports."""

    port: int
    replicas: dict[int, subprocess.Popen[bytes]]

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=BOUND_S)

    def num_alive(self) -> int:
        """Those that listen, once the one that has just ended is found dead.

        A process that ends closes its connections and its port in any order, so its answer can come before its death.
        """
        until_s = time.monotonic() + BOUND_S
        while all(listens(port) for port in self.replicas) and time.monotonic() < until_s:
            time.sleep(0.02)
        return sum(listens(port) for port in self.replicas)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    (port, *replicas), config = free_ports(1 + NUM_REPLICAS), tmp_path / "haproxy.cfg"
    with ExitStack() as running:
        started = {each: _started(running, [sys.executable, "-c", REPLICA, str(each)]) for each in replicas}
        timeouts = [f"    timeout {side} 20s" for side in ("connect", "client", "server")]
        defaults = ["    option redispatch 1", f"    retry-on {TUNED['RAY_SERVE_HAPROXY_RETRY_ON']}", "    retries 3"]
        errors = [f"    errorfile {status} /nothing" for status in (502, 503, 504)]
        frontend = ["frontend http_frontend", f"    bind 127.0.0.1:{port}", "    use_backend replicas"]
        backend = ["backend replicas", "    http-reuse always"]
        servers = [f"    server replica-{each} 127.0.0.1:{each}" for each in replicas]
        parts = ["defaults", "    mode http", *timeouts, *defaults, *errors, *frontend, *backend, *servers, ""]
        config.write_text("\n".join(parts))
        for each in replicas:
            _await_port(each)
        _started(running, [str(SCRIPT), "-db", "-f", str(config)], TALKRAY_HAPROXY=str(HAPROXY), TALKRAY_HOST="")
        _await_port(port)
        yield Front(port, started)


def _started(running: ExitStack, command: list[str], **environment: str) -> "subprocess.Popen[bytes]":
    process = running.enter_context(subprocess.Popen(command, env={**os.environ, **environment}))
    running.callback(process.kill)
    return process


def listens(port: int) -> bool:
    with socket.socket() as trying:
        return trying.connect_ex(("127.0.0.1", port)) == 0


def _await_port(port: int) -> None:
    until_s = time.monotonic() + BOUND_S
    while not listens(port):
        assert time.monotonic() < until_s
        time.sleep(0.02)


def answer(connection: HTTPConnection) -> HTTPResponse:
    response = connection.getresponse()
    response.read()
    return response


def test_a_request_that_ends_its_replica_ends_no_other(front: Front) -> None:
    with closing(front.connect()) as connection:
        connection.request("POST", "/poison", b"small")
        refused = answer(connection)
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert front.num_alive() == NUM_REPLICAS - 1
    with closing(front.connect()) as connection:
        connection.request("POST", "/", b"small")
        assert answer(connection).status == 200


def test_nor_does_one_on_a_connection_that_was_used_before(front: Front) -> None:
    with closing(front.connect()) as connection:
        connection.request("POST", "/", b"small")
        assert answer(connection).status == 200
        connection.request("POST", "/poison", b"small")
        assert answer(connection).status == 503
    assert front.num_alive() == NUM_REPLICAS - 1


def test_nor_does_a_handshake(front: Front) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    with closing(front.connect()) as connection:
        connection.request("GET", "/poison", headers={**upgrade, "Sec-WebSocket-Key": "A" * 22 + "=="})
        assert answer(connection).status == 503
    assert front.num_alive() == NUM_REPLICAS - 1


def test_what_no_replica_has_taken_another_one_answers(front: Front) -> None:
    with ExitStack() as opened:
        connections = [opened.enter_context(closing(front.connect())) for _ in range(6)]
        for connection in connections:
            connection.request("POST", "/", b"small")
        assert [answer(connection).status for connection in connections] == 6 * [200]
        port, victim = next(iter(front.replicas.items()))
        suspend(victim.pid, BOUND_S)
        for connection in connections:
            connection.request("POST", "/", b"small")
        answered, until_s = 0, time.monotonic() + BOUND_S
        while answered + unread(port) < 6:
            assert time.monotonic() < until_s
            answered = len(select.select([connection.sock for connection in connections], [], [], 0.05)[0])
        assert 0 < answered < 6
        victim.kill()
        assert [answer(connection).status for connection in connections] == 6 * [200]


def test_a_client_that_waits_for_leave_to_send_gets_it(front: Front) -> None:
    """The answer's beginning stands once behind the interim one."""
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    for port in (front.port, next(iter(front.replicas))):
        with connected(port) as raw, raw.makefile("rb") as answers:
            raw.sendall(head)
            assert [answers.readline(), answers.readline()] == [b"HTTP/1.1 100 Continue\r\n", b"\r\n"]
            raw.sendall(b"small")
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"


def test_http_1_0_has_the_bytes_until_the_connection_closes(front: Front) -> None:
    asked = [("1.0", ""), ("1.0", "Connection: keep-alive"), ("1.1", "Connection: close")]
    for port, path, (version, more) in product((front.port, next(iter(front.replicas))), ("/parts", "/"), asked):
        with connected(port) as raw, raw.makefile("rb") as answers:
            lines = [f"POST {path} HTTP/{version}", "Host: a", "Content-Length: 5", *filter(None, [more]), "", "small"]
            raw.sendall("\r\n".join(lines).encode())
            headers, _, body = answers.read().partition(b"\r\n\r\n")
        is_chunked = version == "1.1" and path == "/parts"
        assert headers.startswith(b"HTTP/1.1 200 OK\r\n")
        assert (b"chunked" in headers.lower()) == is_chunked
        assert body == (b"RIFFdata: 1end" if path == "/parts" else b"small") or is_chunked


def test_a_body_that_is_none_is_told_so(front: Front) -> None:
    port = next(iter(front.replicas))
    with connected(port) as raw, raw.makefile("rb") as answers:
        raw.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n")
        assert answers.readline() == b"HTTP/1.1 400 Bad Request\r\n"
