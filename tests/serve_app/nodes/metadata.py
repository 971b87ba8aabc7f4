"""The metadata that clouds show to their machines."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler

from tests.loadtest.servers import QuietHandler, running

ACTION, REBALANCE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED, MAINTENANCE = "/computeMetadata/v1/instance/preempted", "/computeMetadata/v1/instance/maintenance-event"
QUIET = {PREEMPTED: "FALSE", MAINTENANCE: "NONE"}


@dataclass
class Metadata:
    """Both clouds' metadata, and their refusal of whoever does not ask as they want to be asked."""

    host: str = ""
    answers: dict[str, str] = field(default_factory=QUIET.copy)
    tokens: int = 0


class Answer(QuietHandler, BaseHTTPRequestHandler):
    cloud: Metadata

    def do_PUT(self) -> None:
        asked = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.cloud.tokens += bool(asked)
        self.answer(200 if asked else 400, f"token{self.cloud.tokens}".encode())

    def do_GET(self) -> None:
        google = self.path.startswith("/computeMetadata/")
        allowed = self.headers["Metadata-Flavor"] == "Google" if google else self._has_token()
        if not allowed:
            self.answer(403 if google else 401, b"")
        elif self.path in self.cloud.answers:
            self.answer(200, self.cloud.answers[self.path].encode())
        else:
            self.answer(404, b"")

    def _has_token(self) -> bool:
        return self.headers["X-aws-ec2-metadata-token"] == f"token{self.cloud.tokens}"


@contextlib.contextmanager
def serving(address: str = "127.0.0.1") -> Iterator[Metadata]:
    """On a free port of an address."""
    cloud = Metadata()
    with running(type("Handler", (Answer,), {"cloud": cloud}), host=address) as url:
        cloud.host = url.removeprefix("http://")
        yield cloud


def interruption(within_s: float) -> str:
    at = datetime.now(UTC) + timedelta(seconds=within_s)
    return json.dumps({"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")})
