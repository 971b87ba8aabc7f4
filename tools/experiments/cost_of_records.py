"""What lines, stages, usage and spans of requests cost: two servers here, one with all of them and one with none.

They are asked in turns, so that whatever else the machine does is the same for both. Printed are the medians of the
time to the first byte of the body, and the median of the differences of neighbours with its interval of 95 %.
"""

import argparse
import http.server
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from serve_app.cli.ray_settings import free_port

_TEXT = "Hi."
_RESAMPLES = 2000


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans and forgets them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def collecting() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def serving(records: dict[str, object], model: str) -> Iterator[str]:
    """The URL of a server with these settings of `api.records`."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        arguments = {"model": model, "api": {"records": records}}
        application = {"name": "talkray", "route_prefix": "/", "import_path": "serve_app.app:build_app"}
        config.write_text(json.dumps({"applications": [{**application, "args": arguments}]}))
        command = [sys.executable, "-m", "serve_app", "serve", "--config", str(config), "--port", str(port), "--quiet"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            if not any("Ctrl-C" in line for line in server.stdout):
                raise SystemExit(f"a server did not start: {' '.join(command)}")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def first_byte_ms(url: str, seed: int) -> float:
    body = {"model": "tts-1", "input": _TEXT, "voice": "alloy", "response_format": "pcm", "seed": seed}
    asked = urllib.request.Request(f"{url}/v1/audio/speech", json.dumps(body).encode())
    asked.add_header("Content-Type", "application/json")
    began_s = time.perf_counter()
    with urllib.request.urlopen(asked) as answer:
        answer.read(1)
        took_ms = (time.perf_counter() - began_s) * 1e3
        answer.read()
    return took_ms


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Of the median, by resampling."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(differences, k=len(differences))) for _ in range(_RESAMPLES))
    return medians[_RESAMPLES // 40], medians[-_RESAMPLES // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--model", default="embedded")
    options = parser.parse_args()
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        on = stack.enter_context(serving({"traces": collector}, options.model))
        off = stack.enter_context(serving({"lines": False, "stages": False, "usage": False}, options.model))
        for url in (on, off) * 5:
            first_byte_ms(url, 0)
        taken: dict[str, list[float]] = {on: [], off: []}
        for pair in range(options.pairs):
            for url in (on, off) if pair % 2 else (off, on):
                taken[url].append(first_byte_ms(url, pair))
    differences = [with_all - with_none for with_all, with_none in zip(taken[on], taken[off], strict=True)]
    low, high = interval(differences)
    with_all, with_none = (statistics.median(taken[url]) for url in (on, off))
    print(f"to the first byte: with all {with_all:.2f} ms, with none {with_none:.2f} ms")
    middle = statistics.median(differences)
    print(f"median of {len(differences)} differences: {middle:+.3f} ms ({low:+.3f} to {high:+.3f})")


if __name__ == "__main__":
    main()
