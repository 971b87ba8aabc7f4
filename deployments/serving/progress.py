"""Messages of replicas to the command that started the application, a line of JSON each.

The command names a pipe in TALKRAY_TOLD, which replicas inherit. They never wait for its reader: a line that finds no
room, or no reader, is lost.
"""

import contextlib
import json
import logging
import os

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
