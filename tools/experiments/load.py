"""`make step-load`, `make overload` and `make simulate-check`: the load test against a server on this machine.

The server uses the embedded checkpoint. `talkray serve` runs Ray without its dashboard, so this module serves replica
counts over HTTP in the format of a cluster's dashboard.
"""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from deployments.config import TalkerConfig
from serve_app.cli.serve.local_server import APP_NAME
from serve_app.config import (
    AdmissionSettings,
    ApiSettings,
    AppConfig,
    CodecScalingConfig,
    PoolConfig,
    TalkerScalingConfig,
)
from tools.suites.application import running

POOL = PoolConfig(num_cpus=0.2)
SCALING = {"max_replicas": 3, "scale_down_window_s": 15}
GROWING = AppConfig(
    model="embedded",
    # Wait for starting replicas instead of refusing requests.
    api=ApiSettings(admission=AdmissionSettings(max_line_s=30, max_wait_s=30, min_streams=64)),
    talker=TalkerConfig(max_num_seqs=4),
    talker_pool=POOL,
    codec_pool=POOL,
    talker_scaling=TalkerScalingConfig(target_use=0.375, **SCALING),
    codec_scaling=CodecScalingConfig(streams_per_replica=2, **SCALING),
)
FIXED = AppConfig(model="embedded")
REQUESTS = ("--speech-s", "1.5", "--max-ttfb", "1000", "--max-stall", "500")
RISING = ("--from", "2", "--factor", "1.3", "--duration", "25", "--settle", "3", "--warmup", "4", "--refine", "0")
SLOWLY_RISING = ("--from", "1", "--factor", "1.5", "--duration", "15", "--settle", "3", "--warmup", "3")
SHORT = ("--speech-s", "1", "--max-ttfb", "400")  # short responses, so more of them fit into the run
PHASES = ("--before", "20", "--during", "60", "--relief", "10", "--after", "20")


class Status(BaseHTTPRequestHandler):
    """HTTP handler that answers every GET with the application's replica counts."""

    def do_GET(self) -> None:
        """Return the part of Serve's status that the load test reads."""
        body = json.dumps({"applications": {APP_NAME: {"deployments": deployments()}}}).encode()
        with contextlib.suppress(BrokenPipeError):  # the load test has ended
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing, because the terminal shows the load test."""


def deployments() -> dict[str, object]:
    """Return target and running replicas of each deployment, in the dashboard's format."""
    from deployments.serving import ray_private  # after `running` has set Ray's variables

    return {
        name: {"target_num_replicas": pool.wanted, "replicas": [{"state": "RUNNING"}] * len(pool.running)}
        for name, pool in ray_private.pools(APP_NAME).items()
    }


@contextlib.contextmanager
def status_server() -> Iterator[str]:
    """Serve the status in a thread of the process that started Ray, and yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Status)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/api/serve/applications/"
    finally:
        server.shutdown()
        thread.join()


def loadtest(*arguments: str) -> int:
    """Run `python -m loadtest` in a separate process."""
    return subprocess.call([sys.executable, "-m", "loadtest", *arguments])


def capacity(sweep: Path, *options: str) -> float:
    """Return the highest rate that the server sustained in a sweep."""
    loadtest("sweep", "--out", str(sweep), *options)
    found: float | None = json.loads((sweep / "sweep.json").read_text(encoding="utf-8"))["capacity_per_s"]
    if found is None:
        sys.exit("not even the lowest rate was sustained: is the machine busy with something else?")
    return found


def step(out: Path, rate: float) -> int:
    """Run a rate that one replica of each pool sustains, then five times that rate, then the first rate again."""
    phases = ("--before", "15", "--during", "50", "--after", "110")
    with running(GROWING) as url, status_server() as status:
        where = ("--url", url, "--serve-status-url", status, "--out", str(out))
        failed = loadtest("step", *where, "--rate", str(rate), *phases, "--warmup", "3", *REQUESTS)
    return failed or loadtest("report", str(out))


def overload(out: Path, rate: float | None) -> int:
    """Run twice the server's capacity. Without `rate`, a sweep measures the capacity."""
    with running(FIXED) as url:
        where = ("--url", url, *REQUESTS)
        sweep = out / "sweep"
        rate = rate or capacity(sweep, *where, *RISING)
        failed = loadtest("overload", *where, "--out", str(out / "overload"), "--rate", str(rate), *PHASES)
    swept = (str(sweep),) if sweep.exists() else ()
    return failed or loadtest("report", str(out / "overload"), *swept, "--out", str(out / "report"))


def simulate_check(out: Path) -> int:
    """Compare the simulator with the server, at the capacity that a sweep measures."""
    with running(FIXED) as url:
        rate = capacity(out / "sweep", "--url", url, *SLOWLY_RISING, *SHORT)
        where = ("--url", url, "--rate", str(rate), "--out", str(out / "check"))
        return loadtest("check-simulation", *where, "--slots", str(FIXED.talker.max_num_seqs), *SHORT)


def main() -> int:
    """Run `step OUT RATE`, `overload OUT [RATE]` or `simulate-check OUT`."""
    match sys.argv[1:]:
        case ["step", out, rate]:
            return step(Path(out), float(rate))
        case ["overload", out, *rates]:
            return overload(Path(out), float(rates[0]) if rates else None)
        case ["simulate-check", out]:
            return simulate_check(Path(out))
    sys.exit(main.__doc__)


if __name__ == "__main__":
    sys.exit(main())
