"""Startup progress, sent by replicas to the command that started the application.

The environment variable TALKRAY_TOLD, which replicas inherit, contains the path of a pipe. Replicas never wait for the
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
    """Log the stage that startup has reached, and send it to the command."""
    logger.info("%s", stage)
    named = os.environ.get(VARIABLE)
    if not named:
        return
    with contextlib.suppress(OSError):
        pipe = os.open(named, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, f"{json.dumps(stage)}\n".encode())  # short, so that several replicas' writes are atomic
        finally:
            os.close(pipe)


@dataclass(frozen=True, slots=True)
class Start:
    """A pool's latest start. A replica stores this note in the cluster's control store for other processes."""

    began_s: float  # time.time()
    stage: str = "starting"
    took_s: float | None = None  # seconds; set when startup is complete
    failed: str | None = None  # why the start failed
    usual_s: float | None = None  # how many seconds the previous start took
    is_asleep: bool = False  # the replica has started and has since released the GPU (`talker.keep_alive_s`)

    def note(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, note: bytes | None) -> Self | None:
        return None if note is None else cls(**json.loads(note))

    def next(self, now_s: float) -> "Start":
        """Return the same pool's next start, with this start's duration as `usual_s`."""
        return Start(now_s, usual_s=self.usual_s if self.took_s is None else self.took_s)

    def ended(self, now_s: float, *, failed: str | None = None) -> "Start":
        return replace(self, took_s=None if failed else now_s - self.began_s, failed=failed)


def start_key(app_name: str, deployment: str) -> str:
    """Return the key for a deployment's note in the control store."""
    return f"start of {deployment} in {app_name}"
