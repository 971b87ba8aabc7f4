"""Ray and the application on this machine, for as long as a command runs."""

import contextlib
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from deployments.errors import TalkrayError
from serve_app import ray_settings
from serve_app.config import AppConfig

APP_NAME = "talkray"
# Clients such as LiveKit keep idle connections for two minutes.
_KEEP_ALIVE_S = 130
_POLL_S = 0.25

Report = Callable[[str], None]


class StartError(TalkrayError):
    """The application did not come up; the message says which deployment failed and why."""


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
    _check_port(address)
    ray_settings.apply_local()
    import ray  # behind the settings, which it reads at import
    from ray import serve

    report("starting Ray")
    needed = _cpus(config)
    ray.init(num_cpus=max(_cores(), needed), include_dashboard=False, log_to_driver=False, logging_level="warning")
    try:
        _start_proxy(address)
        _deploy(config, report)
        _await_ready(address, report)
        yield address.url
    finally:
        report("stopping")
        serve.shutdown()
        ray.shutdown()


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _check_port(address: Address) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise StartError(
                f"{address.host}:{address.port} cannot be used ({error.strerror}): choose another --port"
            ) from None


def _http_options(address: Address) -> dict[str, Any]:
    return {"host": address.host, "port": address.port, "keep_alive_timeout_s": _KEEP_ALIVE_S}


def _cores() -> int:
    import os

    return os.cpu_count() or 1


def _cpus(config: AppConfig) -> int:
    """Whole logical CPUs that all replicas ask for: a small machine runs them all the same."""
    pools = (config.ingress_pool, config.codec_pool, config.talker_pool)
    return -(-int(1000 * sum(pool.num_cpus * pool.replicas for pool in pools)) // 1000)


def _start_proxy(address: Address) -> None:
    from ray import serve
    from ray.exceptions import RayError

    try:
        serve.start(proxy_location="HeadOnly", http_options=_http_options(address))
    except (RayError, TimeoutError) as error:
        last = str(error).strip().splitlines()[-1]
        raise StartError(f"the HTTP proxy did not start: {last}") from error


def _deploy(config: AppConfig, report: Report) -> None:
    """Run the application and report, while that blocks, how its deployments come along."""
    from ray import serve

    from serve_app.app import build_app

    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(done, report), daemon=True)
    watcher.start()
    try:
        serve.run(build_app(config), name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        raise StartError(_failure(str(error))) from error
    finally:
        done.set()
        watcher.join()


def _watch(done: threading.Event, report: Report) -> None:
    """Report every change of the deployments' states until `done`."""
    started_s, last = time.monotonic(), ""
    while not done.wait(_POLL_S):
        line = ", ".join(f"{name} {state}" for name, state in _states().items())
        if line and line != last:
            report(f"{line} ({time.monotonic() - started_s:.0f} s)")
            last = line


def _states() -> dict[str, str]:
    """Each deployment's state in a word."""
    from ray import serve

    application = serve.status().applications.get(APP_NAME)
    deployments = {} if application is None else application.deployments
    return {name: str(status.status.value).lower() for name, status in deployments.items()}


def _failure(fallback: str) -> str:
    """What Serve says of the deployments that did not come up."""
    from ray import serve

    application = serve.status().applications.get(APP_NAME)
    if application is None:
        return fallback
    messages = [f"{name}: {status.message}" for name, status in application.deployments.items() if status.message]
    return "\n".join(messages) or application.message or fallback


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
    raise StartError(
        f"{address.url}/ready did not answer within a minute: see the logs under /tmp/ray/session_latest/logs/serve"
    )


def wait_for_stop() -> None:
    """Return at Ctrl-C or SIGTERM."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
