"""A server for all scenarios of `make page`, with loudspeakers that are none: Firefox plays nothing without."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.config import AdmissionSettings, ApiSettings, AppConfig
from tools.suites.application import running

PATIENT = AdmissionSettings(max_line_s=100, max_wait_s=100, max_late_s=100)
START_S = 20.0


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Base URL. TALKRAY_PAGES_URL names a server that runs already."""
    if url := os.environ.get("TALKRAY_PAGES_URL"):
        yield url
        return
    with running(AppConfig(model="embedded", api=ApiSettings(admission=PATIENT))) as url:
        yield url


@pytest.fixture(scope="session")
def loudspeaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """PulseAudio with a sink that is silent and keeps time."""
    folder = tmp_path_factory.mktemp("pulse")
    folder.chmod(0o700)
    address = folder / "native"
    modules = ("module-null-sink", f"module-native-protocol-unix socket={address} auth-anonymous=1")
    command = ["pulseaudio", "-n", "--daemonize=no", "--exit-idle-time=-1", *(f"--load={each}" for each in modules)]
    assert shutil.which("pulseaudio"), "pulseaudio is missing: make page installs it"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", str(folder))
        environment.setenv("HOME", str(folder))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        environment.undo()
        try:
            _await(address, process)
            environment.setenv("PULSE_SERVER", f"unix:{address}")
            yield
        finally:
            process.terminate()
            process.wait(timeout=START_S)


def _await(address: Path, process: "subprocess.Popen[bytes]") -> None:
    given_up_s = time.monotonic() + START_S
    while not address.exists():
        assert process.poll() is None, "pulseaudio has ended"
        assert time.monotonic() < given_up_s, "pulseaudio does not listen"
        time.sleep(0.05)
