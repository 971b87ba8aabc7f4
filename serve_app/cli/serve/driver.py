"""`python -m serve_app.cli.serve.driver`: process that starts Ray and the application for a supervisor, and monitors
Ray.

Standard input carries one line of JSON, and stays open until the supervisor ends for whatever reason. The driver writes
a line of JSON for each event to standard output. The driver does not shut down gracefully: there is no data to lose,
and Ray's shutdown hangs if one of its processes is gone.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from deployments.errors import StartError
from serve_app.cli import ray_settings
from serve_app.cli.serve import local_server
from serve_app.cli.serve.local_server import Address
from serve_app.cli.serve.run_folder import RunFolder
from serve_app.config import AppConfig

_POLL_S = 0.25
# Without the raylet, Ray schedules and replaces nothing, even though streams continue for a while. Without the GCS
# server, Ray ends the process that started it after a minute.
_VITAL = ("raylet", "gcs_server")


class SupervisorLink:
    """Connection to the supervisor over two pipes."""

    def __init__(self, events: TextIO) -> None:
        self._events = events
        self._lock = threading.Lock()

    def say(self, kind: str, text: str) -> None:
        """Send an event to the supervisor, if the supervisor is still running."""
        try:
            with self._lock:
                self._events.write(f"{json.dumps([kind, text])}\n")
                self._events.flush()
        except BrokenPipeError:
            pass  # the thread waiting for the supervisor to end cleans up

    def stage(self, text: str) -> None:
        self.say("stage", text)

    def clear_up_after(self, folder: RunFolder) -> None:
        """Wait until the supervisor ends, then clean up in its place."""
        sys.stdin.read()
        folder.end_processes()
        folder.keep_logs()
        os._exit(1)


def watch(supervisor: SupervisorLink) -> None:
    """Report that an irreplaceable part of Ray has ended."""
    from deployments.serving.ray_start import ended_part  # imports Ray, which reads its settings on import

    while (lost := ended_part(_VITAL)) is None:
        time.sleep(_POLL_S)
    supervisor.say("lost", lost)


def main() -> None:
    """Start the server, then wait until the supervisor ends or kills this process."""
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    folder = RunFolder(Path(order["folder"]))
    address = Address(order["host"], order["port"])
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as events:  # EOF signals our exit, even after a traceback
        ray_settings.apply_local()  # before anything imports Ray
        os.dup2(2, 1)  # library output must not mix with the events
        supervisor = SupervisorLink(events)
        end = threading.Thread(target=supervisor.clear_up_after, args=(folder,), daemon=True)
        end.start()
        threading.Thread(target=watch, args=(supervisor,), daemon=True).start()
        try:
            local_server.start(AppConfig.model_validate(order["config"]), address, folder, supervisor.stage)
            supervisor.say("ready", address.url)
        except StartError as error:
            supervisor.say("failed", str(error))
        end.join()


if __name__ == "__main__":
    main()
