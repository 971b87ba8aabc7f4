"""What of a running server can be reached from where; docs/network.md describes it."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import aiohttp
import grpc
import pytest

from tests.e2e.black_box import ServerCommand
from tests.e2e.sockets import Listener, listeners

# Serve 2.60 binds the port on which a replica takes calls from other deployments to every address.
REPLICA = "ray::ServeReplica"
CALL = "/ray.serve.ASGIService/HandleRequest"
BOUND_S = 120


@pytest.fixture(scope="module")
def port(plain: ServerCommand) -> int:
    return plain.port


@pytest.fixture(scope="module")
def processes(plain: ServerCommand) -> dict[int, str]:
    """Of `talkray serve`, each with its command line."""
    return plain.processes()


@pytest.fixture(scope="module")
def open_at_start(processes: dict[int, str]) -> list[Listener]:
    return listeners(processes)


async def speak_while_it_is_written(port: int, opened: Callable[[], set[Listener]]) -> None:
    """The ingress opens its mailbox, as `opened` tells, for the first text that comes so."""
    path = f"http://127.0.0.1:{port}/v1/speak?encoding=linear16&sample_rate=24000"
    async with aiohttp.ClientSession() as http, http.ws_connect(path) as written:
        await written.send_json({"type": "Speak", "text": "Hello there, "})
        async with asyncio.timeout(BOUND_S):
            while not opened():  # noqa: ASYNC110, another process changes it
                await asyncio.sleep(0.05)
        await written.send_json({"type": "Flush"})  # else it would be spoken when none had come for a minute
        while (await written.receive(timeout=BOUND_S)).type is not aiohttp.WSMsgType.BINARY:
            pass


def test_the_mailbox_needs_a_token(port: int, processes: dict[int, str], open_at_start: list[Listener]) -> None:
    def opened() -> set[Listener]:
        return {*listeners(processes)} - {*open_at_start}

    asyncio.run(speak_while_it_is_written(port, opened))
    [mailbox] = opened()
    assert processes[mailbox.pid].strip() == f"{REPLICA}:talkray:Ingress"
    assert mailbox.loopback
    for request in (b"\n", b"token 0\n", b"0" * 32 + b" 0\n"):
        with socket.create_connection(("127.0.0.1", mailbox.port), BOUND_S) as connection:
            connection.sendall(request)
            assert connection.recv(1) == b""


def test_every_kind_of_process_was_looked_at(processes: dict[int, str], open_at_start: list[Listener]) -> None:
    listening = {processes[listener.pid] for listener in open_at_start}
    for part in ("gcs_server", "raylet", "ServeController", "ProxyActor", "HAProxyManager", REPLICA, "bin/haproxy"):
        assert any(part in command for command in listening), part


def test_only_ports_between_replicas_are_public(processes: dict[int, str], open_at_start: list[Listener]) -> None:
    open_to_others = sorted(processes[listener.pid].strip() for listener in open_at_start if not listener.loopback)
    replicas = ("Codec", "Ingress", "Jobs", "Talker")
    assert open_to_others == [f"{REPLICA}:talkray:{name}" for name in replicas], "one port each"


def test_the_ports_between_replicas_take_no_call_without_the_token(open_at_start: list[Listener]) -> None:
    for listener in open_at_start:
        if listener.loopback:
            continue
        for metadata in ((), (("authorization", "Bearer " + "0" * 64),)):
            with grpc.insecure_channel(f"127.0.0.1:{listener.port}") as channel, pytest.raises(grpc.RpcError) as told:
                channel.unary_unary(CALL)(b"", metadata=metadata, timeout=30)
            assert told.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_the_proxy_listens_where_told(port: int, processes: dict[int, str], open_at_start: list[Listener]) -> None:
    ports = {listener.port for listener in open_at_start if "bin/haproxy" in processes[listener.pid]}
    assert port in ports
    assert len(ports) == 3, "clients, statistics, metrics"


def test_only_this_user_commands_the_proxy(processes: dict[int, str]) -> None:
    command = next(command for command in processes.values() if "bin/haproxy" in command)
    config = Path(command.split(" -f ")[1].split()[0])
    assert config.with_name("admin.sock").stat().st_mode & 0o777 == 0o600
    assert "timeout http-request 10s" in config.read_text()
    assert "option httplog" not in config.read_text()
