"""Another user of the same machine: what he may see, write, and stand in the way of. A second user needs root."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.black_box import INGRESS, ServerCommand, refusal, serving

NEIGHBOUR = 54321  # no user of this machine has this number
WELL_KNOWN = Path("/tmp/haproxy-serve")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")


def as_neighbour(script: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """A shell script of the other user."""
    user = ["setpriv", f"--reuid={NEIGHBOUR}", f"--regid={NEIGHBOUR}", "--clear-groups"]
    command = [*user, "sh", "-c", script, "sh", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/")


@pytest.fixture(scope="module")
def squatted() -> Iterator[Path]:
    """The folder that Ray would use, made first by the neighbour, who lets everybody write."""
    shutil.rmtree(WELL_KNOWN, ignore_errors=True)
    assert as_neighbour("mkdir -m 777 $1 && chmod 777 $1", WELL_KNOWN).returncode == 0
    yield WELL_KNOWN
    shutil.rmtree(WELL_KNOWN)


@pytest.fixture(scope="module")
def ours(squatted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerCommand]:
    """A server of root's, beside the neighbour's folder."""
    with serving(tmp_path_factory.mktemp("ours")) as server:
        yield server


@pytest.fixture
def victim() -> Iterator[Path]:
    """A file of root's that others may read."""
    with tempfile.NamedTemporaryFile("w", prefix="victim", suffix=".conf") as file:
        file.write("important\n")
        file.flush()
        os.chmod(file.name, 0o644)
        yield Path(file.name)


def files_of(server: ServerCommand) -> set[Path]:
    """Files that its processes write, its sockets with names, and HAProxy's configuration."""
    files: set[Path] = set()
    sockets = {row.split()[6]: row.split()[7] for row in Path("/proc/net/unix").read_text().splitlines() if "/" in row}
    for process, command in server.processes().items():
        files |= {Path(path) for path in re.findall(r"-f (\S+haproxy.cfg)", command)}
        for descriptor in Path(f"/proc/{process}/fd").glob("*"):
            try:
                target = os.readlink(descriptor)
            except FileNotFoundError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                target = sockets.get(target[8:-1], "")
            if (
                target.startswith("/")
                and not target.startswith(("/dev/", "/proc/", "/sys/"))
                and "(deleted)" not in target
            ):
                files.add(Path(target))
    return {path for path in files if path.is_socket() or os.access(path, os.W_OK)} - {server.output_file}


def test_nothing_of_a_server_is_his(ours: ServerCommand, victim: Path) -> None:
    """Neither its files and sockets, nor, through the well-known folder, a file that its user may write."""
    files = files_of(ours)
    assert len(files) > 20, files
    assert any(path.is_socket() for path in files)
    # In a folder such as /tmp, which is sticky, he may write, but not replace what is another's.
    readable = 'test -r "$1" || test -w "$1" || { test -w "$2" && ! test -k "$2"; }'
    open_to_him = [path for path in files if as_neighbour(readable, path, path.parent).returncode == 0]
    swap = 'for d in "$1"/*/; do mv "$d" "$1/x" && mkdir "$d" && ln -s "$2" "$d/haproxy.cfg"; done'
    as_neighbour(swap, WELL_KNOWN, victim)
    [ingress] = ours.find(INGRESS)
    os.kill(ingress, signal.SIGKILL)  # HAProxy is told of another one, and its configuration written again
    until_s = time.monotonic() + 30
    while ours.find(INGRESS) in ([], [ingress]):
        assert time.monotonic() < until_s
        time.sleep(0.1)
    time.sleep(5)
    assert (victim.read_text(), open_to_him) == ("important\n", [])
    assert ours.speak() == 200


def test_a_folder_of_his_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="his") as folder:
        os.chown(folder, NEIGHBOUR, NEIGHBOUR)
        assert "belongs to another user" in refusal(environment={"RAY_TMPDIR": folder})


def test_a_folder_in_which_he_may_rename_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="open") as folder:
        os.chmod(folder, 0o777)
        assert "sticky" in refusal(environment={"RAY_TMPDIR": folder})


def test_a_user_without_a_home_is_told_what_to_set() -> None:
    assert "TALKRAY_CACHE" in refusal(user=NEIGHBOUR, environment={"HOME": None})


def test_he_runs_a_server_at_the_same_time(ours: ServerCommand, tmp_path: Path) -> None:
    """Also after ours has run here; the test lends him the right to read, as the environment may be root's own."""
    home = Path(tempfile.mkdtemp(prefix="home"))
    os.chown(home, NEIGHBOUR, NEIGHBOUR)
    try:
        with serving(tmp_path, user=NEIGHBOUR, environment={"HOME": str(home)}) as his:
            assert (ours.speak(), his.speak()) == (200, 200)
            for server in (ours, his):
                server.signal_process(signal.SIGTERM)
                server.leaves_nothing()
    finally:
        shutil.rmtree(home)
