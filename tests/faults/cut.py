"""Run in a namespace: a head here, a host in the other. Says when streams flow and the link may be harmed."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ray

from serve_app.cli.ray_settings import free_port
from serve_app.cli.serve.local_server import Address, _start_proxy, roll_out
from tests.faults.network import FAR_IP, NEAR_IP, inside
from tests.faults.test_hosts import one_core_each
from tools.suites.listening import Speaking, requests, wrong
from tools.suites.pools import config, tiny_model
from tools.suites.processes import end_proxy

AT_ONCE = 8
STREAMS = requests(AT_ONCE, frames=200)
NOW = "now"
_PATIENCE_S = 90.0


@contextlib.contextmanager
def host(prefix: list[str], log: Path, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A raylet, with the control store if `arguments` say so, that ends with the block."""
    command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


def main(far_namespace: str, scratch: Path) -> None:
    """Speak, be harmed, compare; raises where a stream was not as it should have been."""
    port = free_port()
    head = ["--head", "--node-ip-address", NEAR_IP, "--port", str(port), "--num-cpus", "5"]
    head += ["--temp-dir", str(scratch / "ray"), "--include-dashboard", "false"]
    far = ["--address", f"{NEAR_IP}:{port}", "--node-ip-address", FAR_IP, "--num-cpus", "2"]
    with host([], scratch / "head.log", *head) as near:
        connect(f"{NEAR_IP}:{port}", near)
        with host(inside(far_namespace), scratch / "far.log", *far) as other:
            connect(f"{NEAR_IP}:{port}", near, other)
            speak(scratch)


def connect(address: str, *hosts: "subprocess.Popen[bytes]") -> None:
    """Join the cluster once all of the hosts have."""
    until_s, seen = time.monotonic() + _PATIENCE_S, "no control store"
    while time.monotonic() < until_s:
        ended = [process.returncode for process in hosts if process.poll() is not None]
        assert not ended, f"a host has ended with {ended[0]}: its log says why"
        with contextlib.suppress(OSError, RuntimeError):
            if not ray.is_initialized():
                # Without a control store `ray.init` would wait for a quarter of an hour.
                socket.create_connection((NEAR_IP, int(address.rpartition(":")[2])), timeout=1).close()
                ray.init(address=address, _node_ip_address=NEAR_IP, log_to_driver=False, logging_level="warning")
            alive = sum(node["Alive"] for node in ray.nodes())
            if alive == len(hosts):
                return
            seen = f"{alive} hosts"
        time.sleep(0.5)
    raise AssertionError(f"there is {seen}, not {len(hosts)} hosts")


def speak(scratch: Path) -> None:
    node = ray.get_runtime_context().get_node_id()
    try:
        _start_proxy(Address("127.0.0.1", free_port()))
        roll_out(one_core_each(config(tiny_model(scratch / "tiny"))), lambda line: None)
        elsewhere = replicas_elsewhere(node)
        assert elsewhere > 0
        expected = Speaking(STREAMS, at_once=AT_ONCE).finish()
        speaking = Speaking(STREAMS, at_once=AT_ONCE)
        speaking.go_on(may_begin=True)
        speaking.begun()
        began_s = time.monotonic()
        print(NOW, flush=True)
        heard = speaking.finish()
        assert wrong(heard, expected) == [], wrong(heard, expected)
        after_s = time.monotonic() - began_s
        print(f"{elsewhere} replicas there; {len(heard)} streams, all there {after_s:.1f} s after it")
    finally:
        end_proxy(node)


def replicas_elsewhere(node: str) -> int:
    actors = ray._private.state.actors().values()
    replicas = [actor for actor in actors if actor["State"] == "ALIVE" and actor["Name"].startswith("SERVE_REPLICA")]
    return sum(actor["Address"]["NodeID"] != node for actor in replicas)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # Ray would wait for the host that is cut off
