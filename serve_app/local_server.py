"""Ray and the application on this machine, for as long as a command runs."""

import contextlib
import io
import logging
import math
import os
import shutil
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments import progress
from serve_app import ray_settings
from serve_app.config import AppConfig
from serve_app.exposure import check_exposure
from serve_app.ports import why_unusable
from serve_app.start_error import StartError

LOGS = "/tmp/ray/session_latest/logs"
# Clients such as LiveKit keep idle connections for two minutes.
_KEEP_ALIVE_S = 130
_POLL_S = 0.25

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.host}:{self.port}"


@contextlib.contextmanager
def running(config: AppConfig, address: Address, report: Report) -> Iterator[str]:
    """Start Ray and the application, yield the base URL once it speaks, stop both at the end.

    `report` gets a line whenever the start advances. Raises StartError.
    """
    check_exposure(address.host, config.api.access)
    _check_port(address)
    ray_settings.apply_local()
    scratch = tempfile.mkdtemp(prefix="talkray-")
    os.environ[progress.VARIABLE] = str(Path(scratch) / "progress")  # replicas inherit it
    import ray  # behind the settings, which it reads at import
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    report("starting Ray")
    cpus = _logical_cpus(config)
    ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="warning")
    node_id = ray.get_runtime_context().get_node_id()
    report("starting the proxy")
    try:
        _start_proxy(address)
        _roll_out(config, report)
        _await_ready(address, report)
        yield address.url
    finally:
        report("stopping")
        with contextlib.redirect_stdout(io.StringIO()):  # Ray reports the controller's end as a failure
            serve.shutdown()
            ray.shutdown()
        _end_proxy(node_id)
        os.environ.pop(progress.VARIABLE, None)
        shutil.rmtree(scratch, ignore_errors=True)


def _check_port(address: Address) -> None:
    reason = why_unusable(address.host, address.port)
    if reason is not None:
        raise StartError(f"{address.host}:{address.port} cannot be used ({reason}): choose another --port")


def _http_options(address: Address) -> dict[str, Any]:
    return {"host": address.host, "port": address.port, "keep_alive_timeout_s": _KEEP_ALIVE_S}


def _logical_cpus(config: AppConfig) -> int:
    """Those this process may use, or as many as all replicas ask for: a small machine runs them all the same."""
    scaled = ((config.codec_pool, config.codec_scaling), (config.talker_pool, config.talker_scaling))
    most = [(pool, scaling.max_replicas if scaling else pool.replicas) for pool, scaling in scaled]
    pools = [(config.ingress_pool, config.ingress_pool.replicas), *most]
    return max(len(os.sched_getaffinity(0)), math.ceil(sum(pool.num_cpus * replicas for pool, replicas in pools)))


def _start_proxy(address: Address) -> None:
    from ray import serve
    from ray.exceptions import RayError

    try:
        serve.start(proxy_location="HeadOnly", http_options=_http_options(address))
    except (RayError, TimeoutError) as error:
        last = str(error).strip().splitlines()[-1]
        raise StartError(f"the HTTP proxy did not start: {last} (logs: {LOGS})") from error


def _roll_out(config: AppConfig, report: Report) -> None:
    from serve_app.rollout import roll_out  # imports Ray

    try:
        roll_out(config, report)
    except StartError as error:
        raise StartError(f"{error}\nLogs: {LOGS}") from None


def _is_ready(address: Address) -> bool:
    try:
        with urllib.request.urlopen(f"{address.url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _await_ready(address: Address, report: Report) -> None:
    """Poll /ready: the proxy may need a moment more than the replicas."""
    report("waiting for the first answer")
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if _is_ready(address):
            return
        time.sleep(_POLL_S)
    raise StartError(f"{address.url}/ready did not answer within a minute (logs: {LOGS})")


def _end_proxy(node_id: str) -> None:
    """Kill a HAProxy that outlived the actor that started it: it would hold the port and answer nobody."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end while we look
            command = (process / "cmdline").read_bytes()
            if b"haproxy" in command and node_id.encode() in command:
                os.kill(int(process.name), signal.SIGKILL)


def wait_for_stop() -> None:
    """Return at Ctrl-C, at SIGTERM, or when the terminal is closed."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))
    while not received:  # a lock, as an Event has, would be taken twice when one signal interrupts another's handler
        time.sleep(_POLL_S)
