"""Starts Ray and the application in this process."""

import itertools
import logging
import math
import os
import re
import socket
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from deployments.errors import StartError
from serve_app.cli import ray_settings
from serve_app.cli.serve import early_engine
from serve_app.cli.serve.run_folder import RunFolder
from serve_app.config import AppConfig, PoolConfig
from serve_app.direct import open_direct

APP_NAME = "talkray"
# Clients such as LiveKit keep idle connections open for two minutes.
_KEEP_ALIVE_S = 130
_POLL_S = 0.25
LOOPBACK = "127.0.0.1"  # Ray uses IPv4 loopback even on IPv6-only networks
# Maximum wait for each of Ray's startup steps on a busy machine, and the interval between progress lines.
_PATIENCE_S, _BUSY_S = 600.0, 10.0
_IDLE_PATIENCE_S = 60.0
# Serve's message about a deployment whose constructor raised, even while Serve is retrying.
_RAISED = "failed to start"
# Matches the exception's line in a traceback. All other lines are indented, or are a "Traceback" line.
_EXCEPTION = re.compile(r"^(?:\w+\.)*[A-Z]\w*: ", re.MULTILINE)

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Address:
    """Address that the server binds."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.in_url}:{self.port}"

    @property
    def in_url(self) -> str:
        """Host as written in URLs and HAProxy's configuration, with IPv6 addresses in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host


def start(config: AppConfig, address: Address, folder: RunFolder, report: Report) -> None:
    """Start Ray and the application, and return once the server is ready.

    `report` receives a line for each step. Raises StartError.
    """
    config = _for_host(config, address.host)
    check_port(address)
    talkers = [own.talker_pool for own in config.by_model().values()]
    if any(pool.label_selector for pool in (config.ingress_pool, config.codec_pool, *talkers, *_added(config))):
        raise StartError("label_selector: a local server has no labels. Remove it, or use `serve deploy`")
    for name, value in folder.environment.items():
        os.environ.setdefault(name, value)
    ray_settings.apply_local()
    os.environ["TALKRAY_HOST"] = address.in_url  # only HAProxy listens on this address
    early_engine.begin(config, folder, report)
    import ray  # imported after the settings are set, because Ray reads them at import

    from deployments.serving import ray_private

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray_private.extend_start_timeouts(_PATIENCE_S, ray_settings.free_ports(len(ray_private.AGENT_PORTS)))
    with _waiting("starting Ray", report):
        ray.init(
            "local",
            num_cpus=logical_cpus(config),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
            _temp_dir=str(folder.ray),
        )
    with _waiting("starting the proxy", report):
        proxy = ThreadPoolExecutor(1).submit(_start_proxy, address)
        _await_controller(proxy)
    roll_out(config, report, check=partial(_check, proxy))
    proxy.result()
    _await_ready(address, report)


def _load() -> tuple[float, int]:
    """Return the number of runnable processes and the number of CPUs."""
    return os.getloadavg()[0], len(os.sched_getaffinity(0))


@contextmanager
def _waiting(stage: str, report: Report) -> Iterator[None]:
    """Report a line immediately, then every ten seconds until the context ends."""
    done = threading.Event()
    report(stage)

    def repeat() -> None:
        for turn in itertools.count(1):
            if done.wait(_BUSY_S):
                return
            load, cpus = _load()
            busy = f"; this machine is busy (load {load:.0f} on {cpus} CPUs), waiting for up to {_PATIENCE_S:.0f} s"
            report(f"{stage}: {turn * _BUSY_S:.0f} s{busy if load > cpus else ''}")

    threading.Thread(target=repeat, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def why_unusable(host: str, port: int) -> str | None:
    """Return why this address cannot be bound, or None if it can be."""
    try:
        family, *_, where = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # prefers IPv4
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error.strerror or str(error)
    return None


def why_no_loopback() -> str | None:
    """Return why processes on this machine cannot connect over LOOPBACK, or None if they can connect."""
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_IDLE_PATIENCE_S),
        ):
            return None
    except OSError as error:
        return error.strerror or str(error)


def check_port(address: Address) -> None:
    """Raise StartError if the address cannot be bound."""
    reason = why_unusable(address.host, address.port)
    if reason is not None:
        raise StartError(f"{address.in_url}:{address.port} cannot be used ({reason}): choose another --port")


def _for_host(config: AppConfig, host: str) -> AppConfig:
    """Apply the host name to the access settings, because the ingress only sees Serve's address. Raises StartError."""
    access = config.api.access.for_host(host)
    return config.model_copy(update={"api": config.api.model_copy(update={"access": access})})


def _added(config: AppConfig) -> list[PoolConfig]:
    """Return the extensions' pools."""
    from serve_app.extensions import load_extensions  # imports all dialects, which other commands avoid

    return [each.deploy(config, ()).pool for each in load_extensions(config.api.extensions) if each.deploy is not None]


def logical_cpus(config: AppConfig) -> int:
    """Return the CPUs to declare to Ray: the CPUs of this process, or the total that all replicas request if larger.
    Small machines can then run all replicas.
    """
    models = config.by_model().values()
    codec = config.codec_scaling.max_replicas if config.codec_scaling else config.codec_pool.replicas
    talkers = [
        (own.talker_pool, own.talker_scaling.max_replicas if own.talker_scaling else own.talker_pool.replicas)
        for own in models
    ]
    # There are at most as many codec pools as models.
    codecs = (config.codec_pool, codec * len(models))
    added = [(pool, pool.replicas) for pool in _added(config)]
    pools = [(config.ingress_pool, config.ingress_pool.replicas), codecs, *added, *talkers]
    return max(len(os.sched_getaffinity(0)), math.ceil(sum(pool.num_cpus * replicas for pool, replicas in pools)))


def _start_proxy(address: Address) -> None:
    from ray import serve
    from ray.exceptions import RayError

    # Replicas listen on loopback, because clients bypassing HAProxy could forge their address.
    options = {"host": "127.0.0.1", "port": address.port, "keep_alive_timeout_s": _KEEP_ALIVE_S}
    try:
        serve.start(proxy_location="HeadOnly", http_options=options)
    except (RayError, TimeoutError) as error:
        lines = str(error).strip().splitlines()
        reason = next((line for line in lines if "cannot bind" in line), lines[-1])  # this line contains the address
        raise StartError(f"the HTTP proxy did not start: {reason}") from error


def _check(beside: Future[None]) -> None:
    """Raise any error from work that runs in parallel with the rest of startup."""
    if beside.done():
        beside.result()


def _await_controller(starting: Future[None]) -> None:
    """Return once Serve's controller accepts applications. The proxy needs a few more seconds."""
    from ray.util import list_named_actors

    while not any(actor["namespace"] == "serve" for actor in list_named_actors(all_namespaces=True)):
        _check(starting)
        time.sleep(_POLL_S / 5)


# Names for newcomers, in place of Serve's terms.
PARTS = {"Talker": "speech model", "Codec": "audio decoder", "Ingress": "web server", "Jobs": "long work"}
_STATES = {"UPDATING": "starting", "HEALTHY": "ready"}


def roll_out(config: AppConfig, report: Report, *, check: Callable[[], None] = lambda: None) -> None:
    """Deploy the application on a running Serve, and return once all deployments run.

    `report` receives a line whenever a deployment's state changes. `check` raises if startup has failed elsewhere.
    Raises StartError as soon as a constructor has raised, because a retry on the same machine would fail too.
    """
    from ray import serve

    from serve_app.app import build_app

    target = serve.RunTarget(build_app(config), name=APP_NAME, route_prefix="/")
    with _waiting("deploying", report):
        serve.run_many([target], wait_for_applications_running=False)
    started_s = time.monotonic()
    last = ""
    while (application := serve.status().applications[APP_NAME]).status != "RUNNING":
        if failures := _failures(application):
            raise StartError("\n".join(failures))
        check()
        states = {name: state.status.value for name, state in application.deployments.items()}
        line = ", ".join(f"{_part(name)} {_STATES.get(state, state.lower())}" for name, state in states.items())
        if line != last:
            report(f"{line} ({time.monotonic() - started_s:.0f} s)")
            last = line
        time.sleep(_POLL_S)


def _part(deployment: str) -> str:
    kind, _, model = deployment.partition("-")
    return f"{PARTS[kind]} {model}".rstrip()


def _failures(application: Any) -> list[str]:
    """Return the permanent failures in Serve's ApplicationStatusOverview, one line each."""
    failed = [
        f"{name} did not start: {root_cause(deployment.message)}"
        for name, deployment in application.deployments.items()
        if _RAISED in deployment.message
    ]
    if not failed and application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
        failed.append(f"the application did not start: {application.message}")
    return failed


def root_cause(message: str) -> str:
    """Return the message of the last exception in the traceback that Serve quotes, or all of `message` if it has no
    traceback.
    """
    return _EXCEPTION.split(message)[-1].strip()


def _is_ready(address: Address) -> bool:
    try:
        with open_direct(f"{address.url}/ready", timeout_s=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _await_ready(address: Address, report: Report) -> None:
    """Poll /ready, because the proxy may become ready after the replicas."""
    start_s = time.monotonic()
    with _waiting("waiting for the first response", report):
        while not _is_ready(address):
            waited_s, (load, cpus) = time.monotonic() - start_s, _load()
            if waited_s > (_PATIENCE_S if load > cpus else _IDLE_PATIENCE_S):
                raise StartError(f"{address.url}/ready did not respond within {waited_s:.0f} s")
            time.sleep(_POLL_S)


def first_page(url: str) -> str:
    """Return `url` if an extension serves a page there, otherwise the URL of /docs."""
    with suppress(OSError), open_direct(url, timeout_s=_IDLE_PATIENCE_S):
        return url
    return f"{url}/docs"


def curl_command(url: str, *, with_key: bool) -> str:
    """Return a curl command that synthesizes a sentence."""
    key = ' -H "Authorization: Bearer $TALKRAY_API_KEY"' if with_key else ""
    body = '{"model": "qwen3-tts", "input": "Hello from Talkray.", "voice": "alloy", "response_format": "mp3"}'
    return f"curl {url}/v1/audio/speech -H 'Content-Type: application/json'{key} -d '{body}' -o hello.mp3"
