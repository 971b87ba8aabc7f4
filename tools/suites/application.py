"""Run the application in this process, for tests that inspect it through this process's Ray."""

import contextlib
import io
import os
from collections.abc import Iterator

from serve_app.cli.ray_settings import free_port
from serve_app.cli.serve import run_folder
from serve_app.cli.serve.local_server import Address, Report, start
from serve_app.config import AppConfig


@contextlib.contextmanager
def running(config: AppConfig, port: int | None = None, *, report: Report = print) -> Iterator[str]:
    """Yield the base URL once the application is ready, by default on a free port. Raises `StartError`."""
    address = Address("127.0.0.1", port or free_port())
    with run_folder.created(report) as folder:
        try:
            start(config, address, folder, report)
            yield address.url
        finally:
            stop(report)
            folder.end_processes()
            folder.remove()
            for name, value in list(os.environ.items()):  # the next server of this process uses another folder
                if str(folder.path) in value:
                    del os.environ[name]


def stop(report: Report) -> None:
    """Stop everything that `start` started, even if the start did not complete."""
    import ray  # imported after the settings are in place, because Ray reads them at import
    from ray import serve

    if not ray.is_initialized():  # otherwise, Serve would start Ray to stop it
        return
    report("stopping")
    with contextlib.redirect_stdout(io.StringIO()):  # Ray reports the end of the controller as a failure
        serve.shutdown()
        ray.shutdown()
