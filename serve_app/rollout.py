"""Bringing the application up on a running Serve, and saying why where it does not come up."""

import re
import time
from collections.abc import Callable

from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from deployments.progress import Told
from serve_app.app import build_app
from serve_app.config import AppConfig
from serve_app.start_error import StartError

APP_NAME = "talkray"

_POLL_S = 0.25
# What Serve says of a deployment whose constructor raised, also while it tries again.
_RAISED = "failed to start"
# Where the exception stands in a traceback: all else is indented, or a "Traceback" line without a message.
_EXCEPTION = re.compile(r"^(?:\w+\.)*[A-Z]\w*: ", re.MULTILINE)

Report = Callable[[str], None]


def roll_out(config: AppConfig, report: Report) -> None:
    """Deploy the application, return once all of it runs. `report` gets a line whenever a deployment's state changes.

    Raises StartError as soon as a constructor has raised: on one machine it would raise again.
    """
    target = serve.RunTarget(build_app(config), name=APP_NAME, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    started_s, last, told = time.monotonic(), "", Told.here()
    while (application := serve.status().applications[APP_NAME]).status is not ApplicationStatus.RUNNING:
        if failures := _failures(application):
            raise StartError("\n".join(failures))
        line = ", ".join(f"{name} {state.status.value.lower()}" for name, state in application.deployments.items())
        if line != last:
            report(f"{line} ({time.monotonic() - started_s:.0f} s)")
            last = line
        for stage in told.new_lines():
            report(stage)
        time.sleep(_POLL_S)


def _failures(application: ApplicationStatusOverview) -> list[str]:
    """What has failed for good, a line each."""
    failed = [
        f"{name} did not start: {root_cause(deployment.message)}"
        for name, deployment in application.deployments.items()
        if _RAISED in deployment.message
    ]
    if not failed and application.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
        failed.append(f"the application did not start: {application.message}")
    return failed


def root_cause(message: str) -> str:
    """The message of the last exception in the traceback that Serve quotes; all of `message` where it quotes none."""
    return _EXCEPTION.split(message)[-1].strip()
