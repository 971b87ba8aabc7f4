"""`python -m serve_app.cli.serve.driver`: the process that starts Ray and the application for a supervisor, and watches
Ray.

Its standard input is one line of JSON, then stays open until the supervisor ends, for whatever reason. Its standard
output has a line of JSON for each event. It never shuts down in order: nothing would be lost here, and Ray hangs on
shutdown if it has lost a part.
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
# Without the one nothing is scheduled or replaced, though streams go on for a while; without the other Ray ends the
# process that has started it a minute later.
_VITAL = ("raylet", "gcs_server")


class SupervisorLink:
    """The process that started this one, at the other end of two pipes."""

    def __init__(self, events: TextIO) -> None:
        self._events = events
        self._lock = threading.Lock()

    def say(self, kind: str, text: str) -> None:
        """Pass an event on, if the supervisor still runs."""
        try:
            with self._lock:
                self._events.write(f"{json.dumps([kind, text])}\n")
                self._events.flush()
        except BrokenPipeError:
            pass  # the thread that waits for the supervisor's end cleans up

    def stage(self, text: str) -> None:
        self.say("stage", text)

    def clear_up_after(self, folder: RunFolder) -> None:
        """Wait until the supervisor ends, then clean up in its place."""
        sys.stdin.read()
        folder.end_processes()
        folder.keep_logs()
        os._exit(1)


def watch(supervisor: SupervisorLink) -> None:
    """Report when a part of Ray that cannot be replaced has ended."""
    from deployments.serving import ray_private  # imports Ray, which reads the settings at import

    while (lost := ray_private.ended_part(_VITAL)) is None:
        time.sleep(_POLL_S)
    supervisor.say("lost", lost)


def main() -> None:
    """Start, then stay until the supervisor kills this process or ends itself."""
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    folder = RunFolder(Path(order["folder"]))
    address = Address(order["host"], order["port"])
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as events:  # its EOF announces our end, after a traceback too
        ray_settings.apply_local()  # before anything imports Ray
        os.dup2(2, 1)  # whatever a library prints is no event
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
