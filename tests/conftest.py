"""Ray reads its settings when the first test module imports it: all tests run under the tuned ones.

Some simulate a cluster: only `talkray serve` as a process of its own keeps to loopback addresses."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

from serve_app.cli import ray_settings

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # simulated nodes cannot meet on a loopback address
ray_settings.apply_local()
os.environ["TALKRAY_DATA"] = tempfile.mkdtemp(prefix="talkray-data-")  # voices that tests store
atexit.register(shutil.rmtree, os.environ["TALKRAY_DATA"], ignore_errors=True)

pytest_plugins = ["tests.e2e.black_box"]

# Folders whose tests need more than a CPU and a moment: each has a mark of its name.
MARKED = ("clients", "e2e", "faults", "fleet", "prometheus", "scale")


def _has_threads_of_ray() -> bool:
    for comm in Path("/proc/self/task").glob("*/comm"):  # none where there is no /proc
        with suppress(OSError):  # the thread has ended meanwhile
            if "gcs_client_io" in comm.read_text():
                return True
    return False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, int, int]:
    """End a process that had Ray in it before Python and C++ free their objects.

    Three sessions ended with a segmentation fault behind their results, each in a thread without a name. The only such
    thread at that time is one that Ray 2.60 starts and never ends, which hands metrics on (`RunHarvesterLoop`).
    """
    status = yield
    if _has_threads_of_ray():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status))
    return status


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    folders = {item: item.path.relative_to(here).parts[0] for item in items if item.path.is_relative_to(here)}
    for item, folder in folders.items():
        if folder in MARKED:
            item.add_marker(folder)
    # One process has one Ray: tests with a cluster of their own come before those that share the service.
    items.sort(key=lambda item: folders.get(item) == "faults" and "service" in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """What has been imported stays: a full collection, which some tests ask for, need not look at it again."""
    gc.collect()
    gc.freeze()


def pytest_exception_interact() -> None:
    """Once a test has failed, warnings of objects that are collected are no failures of others: the failed test may
    have left a process or a socket open, and pytest would raise that in a later test, or behind its summary.
    """
    sys.unraisablehook = lambda unraisable: None


@pytest.fixture(autouse=True)
def no_metrics_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that hands a replica's metrics to Ray never ends. It would meet the clocks and fakes of later tests."""
    if module := sys.modules.get("deployments.serving.ray_metrics"):
        monkeypatch.setattr(module.Recorder, "run", lambda self: None)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
