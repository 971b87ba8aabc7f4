"""Clients that mean no good, against `talkray serve`: commands and sockets only (`black_box.py`).

Clients are told apart by addresses, 127.0.0.x.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.black_box import INGRESS, ServerCommand, create_key, serving
from tests.e2e.sockets import listeners
from tools.suites.processes import read_logs
from tools.suites.raw import RawSocket, ask, connected, deflated, read_to_end, request

pytestmark = pytest.mark.hostile

PER_MINUTE = 30
MAX_CONNECTIONS = 600
CONFIG = f"""
api:
  admission:
    client_requests_per_minute: {PER_MINUTE}
"""
SHORT = {"input": "Hello.", "voice": "alloy", "response_format": "pcm", "max_new_tokens": 2}
MIB = 1 << 20


def unfinished(raw: socket.socket, key: str = "") -> None:
    """The head of a request and a small part of its body."""
    raw.sendall(request(b'{"input":', {"Authorization": f"Bearer {key}"} if key else {}, announced=100_000))


@dataclass(frozen=True, slots=True)
class Guarded:
    server: ServerCommand
    file: Path
    key: str

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def ingress(self) -> int:
        [process] = self.server.find(INGRESS)
        return process

    def bearer(self, key: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {key or self.key}"}

    def create_key(self, name: str, *limits: str) -> str:
        return create_key(self.file, name, *limits)

    def speak(self, source: str, key: str | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        return ask(self.port, SHORT, source=source, headers={**self.bearer(key), **headers})


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("hostile")
    file, config = folder / "keys.json", folder / "talkray.yaml"
    key = create_key(file, "ada")
    config.write_text(CONFIG)
    options = ("--config", str(config), "--host", "0.0.0.0", "--keys", str(file))
    with serving(folder, *options, environment={"RAY_SERVE_HAPROXY_MAXCONN": str(MAX_CONNECTIONS)}) as server:
        yield Guarded(server, file, key)


def test_unfinished_messages_hold_little(guarded: Guarded) -> None:
    """A hundred of them, compressed where the server agrees to that, which makes a thousand bytes of one."""
    before, bomb = resident(guarded.ingress), deflated(16 * MIB - 1)
    with ExitStack() as opened:
        for number in range(100):
            raw = opened.enter_context(connected(guarded.port, f"127.0.0.{20 + number % 4}"))
            client = RawSocket(raw, key=guarded.key, compressed=True)
            assert client.status == 101
            with suppress(ConnectionError):
                payload = bomb if client.compresses else b" " * MIB
                client.send(payload, final=False, compressed=client.compresses)
            held = resident(guarded.ingress) - before
            assert held < 100 * MIB, f"{number + 1} sockets hold {held / MIB:.0f} MiB"
        held = settled(guarded.ingress, before, 1000 * MIB, 1.0)
        assert held < 100 * MIB
    kept = settled(guarded.ingress, before, 20 * MIB, 5.0)
    assert kept < 20 * MIB, f"{kept / MIB:.0f} MiB are kept"


def resident(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def settled(pid: int, before: int, below: int, within_s: float) -> int:
    """By how much its memory has grown: less than `below`, or what it is after so long."""
    until_s = time.monotonic() + within_s
    while (grown := resident(pid) - before) >= below and time.monotonic() < until_s:
        time.sleep(0.1)
    return grown


def test_a_connection_is_closed_after_its_refusal(guarded: Guarded) -> None:
    with connected(guarded.port, "127.0.0.30") as raw:
        unfinished(raw)
        answer = read_to_end(raw, 5.0)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"www-authenticate: bearer" in answer.lower()
    assert b'"invalid_api_key"' in answer
    with connected(guarded.port, "127.0.0.30") as raw:
        raw.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_to_end(raw, 5.0).startswith(b"HTTP/1.1 401 ")


def test_connections_of_one_address_are_limited(guarded: Guarded) -> None:
    with ExitStack() as opened:
        for _ in range(MAX_CONNECTIONS + 20):
            with suppress(ConnectionError):
                raw = opened.enter_context(connected(guarded.port, "127.0.0.31"))
                unfinished(raw, guarded.key)
        status, _, _ = ask(guarded.port, operation="GET /health", source="127.0.0.32")
    assert status == 200


def test_nobody_else_reaches_the_ports_behind_the_proxy(guarded: Guarded) -> None:
    """They believe what X-Forwarded-For says."""
    direct = [listener for listener in listeners([guarded.ingress]) if 30000 <= listener.port < 31000]
    assert direct
    assert [listener for listener in direct if not listener.loopback] == []


def test_a_key_file_that_is_gone_for_a_moment_resets_no_limit(guarded: Guarded) -> None:
    key = guarded.create_key("limited", "--requests-per-minute", "2")
    statuses = [guarded.speak("127.0.0.44", key)[0] for _ in range(3)]
    away = guarded.file.rename(guarded.file.with_name("away"))
    statuses.append(guarded.speak("127.0.0.44", key)[0])
    away.rename(guarded.file)
    statuses.append(guarded.speak("127.0.0.44", key)[0])
    assert statuses == [200, 200, 429, 401, 429]


def test_no_log_has_an_id_that_is_not_sane(guarded: Guarded) -> None:
    forged = {"X-Request-ID": "a [x] forged-canary-line"}
    ask(guarded.port, SHORT, source="127.0.0.52", headers={**guarded.bearer(), **forged})
    logs = read_logs(guarded.server.processes())
    assert logs
    assert [str(file) for file, content in logs.items() if b"forged-canary-line" in content] == []


def test_a_message_that_is_too_large_is_told_so(guarded: Guarded) -> None:
    with connected(guarded.port, "127.0.0.54") as raw:
        client = RawSocket(raw, key=guarded.key)
        sender = threading.Thread(target=send_too_much, args=(client,))
        sender.start()
        end = next(client.messages())
        sender.join()
    assert (end["type"], end.get("code")) == ("close", 1009)


def send_too_much(client: RawSocket) -> None:
    with suppress(OSError):
        client.send(b" " * (17 * MIB))


def test_prior_knowledge_of_http_2_is_refused(guarded: Guarded) -> None:
    with connected(guarded.port, "127.0.0.55") as raw:
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        assert read_to_end(raw, 5.0).startswith(b"HTTP/1.1 400 ")
