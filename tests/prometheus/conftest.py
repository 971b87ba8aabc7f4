"""A real Prometheus: `make metrics` runs these tests."""

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def prometheus_bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `prometheus` and `promtool`, out of Debian's package; nothing is installed."""
    folder = tmp_path_factory.mktemp("prometheus")
    # As root, apt would download as another user, who may not write here, and says so.
    subprocess.run(["apt-get", "-o", "APT::Sandbox::User=root", "download", "prometheus"], cwd=folder, check=True)
    (package,) = folder.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "--extract", package.name, "."], cwd=folder, check=True)
    return folder / "usr" / "bin"
