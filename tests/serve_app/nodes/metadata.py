"""The metadata that clouds show to their machines."""

import contextlib
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ACTION, REBALANCE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED, MAINTENANCE = "/computeMetadata/v1/instance/preempted", "/computeMetadata/v1/instance/maintenance-event"
QUIET = {PREEMPTED: "FALSE", MAINTENANCE: "NONE"}


class Metadata(ThreadingHTTPServer):
    """Both clouds' metadata, and their refusal of whoever does not ask as they want to be asked."""

    def __init__(self, address: str) -> None:
        super().__init__((address, 0), Answer)
        self.answers: dict[str, str] = dict(QUIET)
        self.tokens = 0

    @property
    def host(self) -> str:
        return f"{self.server_address[0]!s}:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        asked = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.server.tokens += bool(asked)
        self._answer(200 if asked else 400, f"token{self.server.tokens}")

    def do_GET(self) -> None:
        google = self.path.startswith("/computeMetadata/")
        allowed = self.headers["Metadata-Flavor"] == "Google" if google else self._has_token()
        if not allowed:
            self._answer(403 if google else 401, "")
        elif self.path in self.server.answers:
            self._answer(200, self.server.answers[self.path])
        else:
            self._answer(404, "")

    def _has_token(self) -> bool:
        return self.headers["X-aws-ec2-metadata-token"] == f"token{self.server.tokens}"

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def serving(address: str = "127.0.0.1") -> Iterator[Metadata]:
    """On a free port of an address."""
    with Metadata(address) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def interruption(within_s: float) -> str:
    at = datetime.now(UTC) + timedelta(seconds=within_s)
    return json.dumps({"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")})
