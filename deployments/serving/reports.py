"""Start-up progress, sent from replicas to the command that started the application.

The environment variable TALKRAY_TOLD contains the path of a pipe, and replicas inherit it. Replicas never wait for the
pipe's reader. A line is lost if the pipe is full or has no reader.
"""

import contextlib
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from typing import Self

VARIABLE = "TALKRAY_TOLD"

logger = logging.getLogger(__name__)


def report_stage(stage: str) -> None:
    """Log the stage that a start has reached, and send the stage to the command."""
    logger.info("%s", stage)
    named = os.environ.get(VARIABLE)
    if not named:
        return
    with contextlib.suppress(OSError):
        pipe = os.open(named, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, f"{json.dumps(stage)}\n".encode())  # short, so writes of several replicas are atomic
        finally:
            os.close(pipe)


@dataclass(frozen=True, slots=True)
class Start:
    """Latest start of a pool. A replica stores this note in the cluster's control store for other processes."""

    began_s: float  # time.time()
    stage: str = "starting"
    took_s: float | None = None  # seconds; set at the end of the start
    failed: str | None = None  # why the start failed
    usual_s: float | None = None  # seconds that the previous start took
    is_asleep: bool = False  # the replica is started and has released the GPU (`talker.keep_alive_s`)

    def note(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, note: bytes | None) -> Self | None:
        return None if note is None else cls(**json.loads(note))

    def next(self, now_s: float) -> "Start":
        """Return the next start of the same pool, with the duration of this start as `usual_s`."""
        return Start(now_s, usual_s=self.usual_s if self.took_s is None else self.took_s)

    def ended(self, now_s: float, *, failed: str | None = None) -> "Start":
        return replace(self, took_s=None if failed else now_s - self.began_s, failed=failed)


def start_key(app_name: str, deployment: str) -> str:
    """Return the key of a deployment's note in the control store."""
    return f"start of {deployment} in {app_name}"
