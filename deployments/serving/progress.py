"""Messages of replicas to the command that started the application, a line of JSON each.

The command names a pipe in TALKRAY_TOLD, which replicas inherit. They never wait for its reader: a line that finds no
room, or no reader, is lost.
"""

import contextlib
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from typing import Self

VARIABLE = "TALKRAY_TOLD"

logger = logging.getLogger(__name__)


def tell(kind: str, *said: object) -> None:
    named = os.environ.get(VARIABLE)
    if not named:
        return
    with contextlib.suppress(OSError):
        pipe = os.open(named, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, f"{json.dumps([kind, *said])}\n".encode())  # this short it is written whole
        finally:
            os.close(pipe)


def report_stage(stage: str) -> None:
    """Log what a start is busy with from now on, and show it to the command that waits."""
    logger.info("%s", stage)
    tell("stage", stage)


@dataclass(frozen=True, slots=True)
class Start:
    """How the latest start of a pool goes, as its replica leaves it in the cluster's control store for the others."""

    began_s: float  # time.time()
    stage: str = "starting"
    took_s: float | None = None  # the whole start, once it has come to its end
    failed: str | None = None  # why it came to none
    usual_s: float | None = None  # as long as the one before took

    def note(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, note: bytes | None) -> Self | None:
        return None if note is None else cls(**json.loads(note))

    def next(self, now_s: float) -> "Start":
        """The start that follows this one."""
        return Start(now_s, usual_s=self.usual_s if self.took_s is None else self.took_s)

    def ended(self, now_s: float, *, failed: str | None = None) -> "Start":
        return replace(self, took_s=None if failed else now_s - self.began_s, failed=failed)


def start_key(app_name: str, deployment: str) -> str:
    """Under which the note of a deployment's start stands in the control store."""
    return f"start of {deployment} in {app_name}"
