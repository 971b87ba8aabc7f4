"""Access to Ray's private interfaces for commands that start Ray on this machine. See `ray_private.py`."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
from ray._private import node, ray_constants, services
from ray._private.node import Node
from ray._raylet import persist_port  # type: ignore[attr-defined]
from ray.serve._private import api, client

from deployments.errors import StartError

_POLL_S = 0.25
# Processes of Ray that nothing here uses. `ray.init` would wait three seconds for the first.
_UNUSED = ("start_api_server", "start_monitor", "start_log_monitor")
# Address of the dashboard, where nothing listens. Without one, Ray's agent would log an error each second.
_NO_DASHBOARD = b"127.0.0.1:1"
_starting: list[Node] = []
# Ports for Ray's agents. If Ray chooses a port itself, the raylet exits unless the agent reports it within 15 s.
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def extend_start_timeouts(patience_s: float, agent_ports: Sequence[int]) -> None:
    """Extend the time limits of `ray.init` and of Serve's proxy to `patience_s`, and register parts for `ended_part`.
    Ray starts without its dashboard, cluster autoscaler and log monitor.

    `agent_ports` are free ports, one for each of AGENT_PORTS. After `patience_s`, `ray.init` raises StartError and
    Serve raises TimeoutError.
    """
    start = Node.start_head_processes

    def remembered(started: Node) -> None:
        _starting.append(started)
        for name, port in zip(AGENT_PORTS, agent_ports, strict=True):
            setattr(started._ray_params, name, port)
            persist_port(started._session_dir, started._node_id, name, port)  # the agent later writes the same value
        start(started)
        started.get_gcs_client().internal_kv_put(
            ray_constants.DASHBOARD_ADDRESS.encode(), _NO_DASHBOARD, True, ray_constants.KV_NAMESPACE_DASHBOARD
        )

    def patient(ask: Callable[..., Any], **short: int) -> Callable[..., Any]:
        def asked(*which: Any, **limits: Any) -> Any:
            until_s = time.monotonic() + patience_s
            while True:
                try:
                    return ask(*which, **limits | short)
                except RuntimeError as error:  # the part is not registered yet, or the control store does not respond
                    if time.monotonic() > until_s:
                        raise StartError(f"Ray did not start within {patience_s:.0f} s: {error}") from error
                    time.sleep(_POLL_S)

        return asked

    for name in _UNUSED:
        setattr(Node, name, lambda started, **options: None)
    Node.start_head_processes = remembered
    services.get_node = patient(services.get_node)
    # `wait_for_persisted_port` blocks all other threads while waiting, so it is called repeatedly with short waits.
    node.wait_for_persisted_port = patient(node.wait_for_persisted_port, timeout_ms=100)
    api.HTTP_PROXY_TIMEOUT = client.HTTP_PROXY_TIMEOUT = patience_s


def ended_part(names: Iterable[str]) -> str | None:
    """Describe the first of the named Ray processes on this node that has ended; None while all are running."""
    nodes = [*_starting, ray._private.worker._global_node]
    started = dict(next((node.all_processes for node in nodes if node is not None), {}))
    for name in names:
        for process in (info.process for info in started.get(name, ())):
            if process.poll() is not None:
                status = process.returncode
                how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
                return f"Ray's {name} (process {process.pid}) {how}"
    return None
