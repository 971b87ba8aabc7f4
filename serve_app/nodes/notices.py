"""`python -m serve_app.nodes.notices aws|gcp`: drains this node before its cloud terminates it. Run it next to `ray
start`.

Ray 2.60 does not read termination notices. Replicas of a draining node start on other nodes, and its streams continue
there from their codes (docs/reliability.md), even streams that would outlast the notice. This module uses only the
standard library, because it runs on every node.
"""

import argparse
import http.client
import json
import logging
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from serve_app.direct import open_direct

logger = logging.getLogger(__name__)

_POLL_S = 5.0
_ANSWER_S = 2.0
_TOKEN_S = 21_600
# Assumed lead time, in seconds, of notices that state none: a recommendation, and Google's two kinds of termination.
_RECOMMENDED_S, _PREEMPTED_S, _MAINTENANCE_S = 600.0, 30.0, 3600.0
# Serve stops a replica `graceful_shutdown_timeout_s` (`_DRAIN_S` in app.py) before the deadline, even if its
# replacement is not running yet. Ray is therefore given a deadline after the node's end, so replicas keep speaking
# until _HAND_OVER_S before that end.
_SHUTDOWN_S, _HAND_OVER_S = 120.0, 15.0


@dataclass(frozen=True, slots=True)
class Notice:
    """Announcement that a node will be terminated."""

    reason: str
    left_s: float

    @property
    def deadline_s(self) -> int:
        return max(1, round(self.left_s + _SHUTDOWN_S - _HAND_OVER_S))


class MetadataUnreachable(Exception):
    """The cloud's metadata server does not respond."""


def _ask(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str | None:
    """Return the response text, or None for status 404, which means that there is no notice."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with open_direct(request, timeout_s=_ANSWER_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == http.client.NOT_FOUND:
            return None
        raise MetadataUnreachable(f"{url}: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise MetadataUnreachable(f"{url}: {error}") from error


class Aws:
    """AWS notices (IMDSv2): spot interruptions, two minutes ahead, and rebalance recommendations."""

    def __init__(self, base: str) -> None:
        self._base, self._token, self._token_ends_s = base, "", 0.0

    def notice(self) -> Notice | None:
        """Return the current notice. Raises MetadataUnreachable."""
        if action := self._get("meta-data/spot/instance-action"):
            announced = json.loads(action)
            left_s = datetime.fromisoformat(announced["time"]).timestamp() - time.time()
            return Notice(f"spot instance: {announced['action']} at {announced['time']}", max(0.0, left_s))
        if recommended := self._get("meta-data/events/recommendations/rebalance"):
            return Notice(f"rebalance recommendation of {json.loads(recommended)['noticeTime']}", _RECOMMENDED_S)
        return None

    def _get(self, path: str) -> str | None:
        if time.monotonic() >= self._token_ends_s:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            self._token = _ask(f"{self._base}/latest/api/token", ttl, method="PUT") or ""
            self._token_ends_s = time.monotonic() + _TOKEN_S / 2
        return _ask(f"{self._base}/latest/{path}", {"X-aws-ec2-metadata-token": self._token})


class Gcp:
    """Google Cloud notices: preemption, up to 30 s ahead, and maintenance that terminates the instance (an hour ahead
    with GPUs).
    """

    def __init__(self, base: str) -> None:
        self._base = base

    def notice(self) -> Notice | None:
        """Return the current notice. Raises MetadataUnreachable."""
        if self._get("preempted") == "TRUE":
            return Notice("spot instance: preempted", _PREEMPTED_S)
        if (event := self._get("maintenance-event")) and event.startswith("TERMINATE"):  # others migrate it
            return Notice(f"maintenance: {event}", _MAINTENANCE_S)
        return None

    def _get(self, name: str) -> str:
        answer = _ask(f"{self._base}/computeMetadata/v1/instance/{name}", {"Metadata-Flavor": "Google"})
        return (answer or "").strip()


def cloud(name: str, environment: Mapping[str, str]) -> Aws | Gcp:
    """Return the cloud with this name. Environment variables of the clouds' own libraries override the address."""
    if name == "aws":
        return Aws(environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/"))
    return Gcp(f"http://{environment.get('GCE_METADATA_HOST', 'metadata.google.internal')}")


def watch(metadata: Aws | Gcp, drain: Callable[[Notice], None]) -> None:
    """Poll for a notice, then drain the node. A recommendation may be followed by a notice with an earlier time."""
    reachable, drained_s = True, float("inf")  # time.monotonic() of the announced end
    while True:
        try:
            notice, problem = metadata.notice(), None
        except (MetadataUnreachable, ValueError, KeyError) as error:
            notice, problem = None, error
        if reachable and problem:  # logged once, not every five seconds
            logger.warning("termination notices cannot be read: %s", problem)
        reachable = problem is None
        if notice is not None and (ends_s := time.monotonic() + notice.left_s) < drained_s - _POLL_S:
            logger.warning("%s: draining, %.0f s left", notice.reason, notice.left_s)
            try:
                drain(notice)
                drained_s = ends_s
            except NotDrained as error:
                logger.error("%s; trying again", error)
        time.sleep(_POLL_S)


class NotDrained(Exception):
    """Ray did not drain this node. The message states the reason."""


def raylet_options(processes: Path) -> dict[str, str]:
    """Return the options of the raylet among `processes`, which include the node's id and the control store. Raises
    NotDrained.
    """
    for process in processes.glob("[0-9]*/cmdline"):
        try:
            executable, *options = process.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process has ended
            continue
        if executable.endswith("/raylet"):
            pairs = (option.lstrip("-").partition("=") for option in options if "=" in option)
            return {name: value for name, _, value in pairs}
    raise NotDrained("no raylet is running: start this program next to `ray start`, in the same container")


def drain_node(notice: Notice) -> None:
    """Drain this node. Raises NotDrained."""
    options = raylet_options(Path("/proc"))
    order = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", options["gcs-address"]]
    order += ["--node-id", options["node_id"], "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    order += ["--reason-message", notice.reason, "--deadline-remaining-seconds", str(notice.deadline_s)]
    try:
        subprocess.run(order, check=True, capture_output=True, text=True, timeout=60)
    except subprocess.SubprocessError as error:
        raise NotDrained(f"{error}: {getattr(error, 'stderr', '') or ''}") from error


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m serve_app.nodes.notices", description=__doc__)
    parser.add_argument("cloud", choices=("aws", "gcp"))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s notices: %(message)s")
    watch(cloud(parser.parse_args().cloud, os.environ), drain_node)


if __name__ == "__main__":
    main()
