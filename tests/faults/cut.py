"""Run in a namespace: a head here, a host in the other one, and the link between them cut while streams flow."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ray
from ray import serve

from serve_app.local_server import Address, _end_proxy, _start_proxy
from serve_app.ports import free_port
from serve_app.rollout import roll_out
from tests.faults.network import FAR_IP, NEAR_IP, Link
from tests.faults.pools import config, tiny_model
from tests.faults.speaking import Speaking, requests, wrong
from tests.faults.test_hosts import one_core_each

AT_ONCE = 8
STREAMS = requests(AT_ONCE, frames=400)


@contextlib.contextmanager
def host(prefix: list[str], *arguments: str) -> Iterator[None]:
    """A raylet, with the control store if `arguments` say so, that ends with the block."""
    command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def main(link: Link, scratch: Path) -> None:
    """Speak, cut, compare; raises where a stream was not as it should have been."""
    port = free_port()
    temporary = ["--temp-dir", str(scratch / "ray")]
    head = ["--head", "--node-ip-address", NEAR_IP, "--port", str(port), "--num-cpus", "3", *temporary]
    far = ["--address", f"{NEAR_IP}:{port}", "--node-ip-address", FAR_IP, "--num-cpus", "2"]
    with host([], *head, "--include-dashboard", "false"):
        with host(link.inside(link.far), *far):
            connect(f"{NEAR_IP}:{port}", hosts=2)
            speak(link, scratch)
        ray.shutdown()


def connect(address: str, *, hosts: int) -> None:
    """Join the cluster once it is whole."""
    for _ in range(120):
        with contextlib.suppress(ConnectionError, RuntimeError):
            ray.init(address=address, log_to_driver=False, logging_level="warning", ignore_reinit_error=True)
            if sum(node["Alive"] for node in ray.nodes()) == hosts:
                return
        time.sleep(0.5)
    raise AssertionError("the cluster did not come up")


def speak(link: Link, scratch: Path) -> None:
    """The streams without and with the cut."""
    node = ray.get_runtime_context().get_node_id()
    try:
        _start_proxy(Address("127.0.0.1", free_port()))
        roll_out(one_core_each(config(tiny_model(scratch / "tiny"))), lambda line: None)
        expected = Speaking(STREAMS, at_once=AT_ONCE).finish()
        speaking = Speaking(STREAMS, at_once=AT_ONCE)
        speaking.go_on(may_begin=True)
        speaking.begun()
        cut_s = time.monotonic()
        link.cut()
        heard = speaking.finish()
        assert wrong(heard, expected) == [], wrong(heard, expected)
        print(f"{len(heard)} streams, all there {time.monotonic() - cut_s:.1f} s after the cut")
    finally:
        serve.shutdown()
        _end_proxy(node)


if __name__ == "__main__":
    main(Link(*sys.argv[1:5]), Path(sys.argv[5]))
    os._exit(0)  # Ray would wait for the host that is cut off
