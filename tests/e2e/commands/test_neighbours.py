"""Another user of the same machine: what he may see, write, and stand in the way of. A second user needs root."""

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.black_box import INGRESS, ServerCommand, refusal
from tests.e2e.commands.conftest import IS_ROOT, NEIGHBOUR, WELL_KNOWN, Guarded, as_neighbour

pytestmark = pytest.mark.skipif(not IS_ROOT, reason="only root may act as another user")


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


def test_nothing_of_a_server_is_his(plain: ServerCommand, victim: Path) -> None:
    """Neither its files and sockets, nor, through the well-known folder, a file that its user may write."""
    files = files_of(plain)
    assert len(files) > 20, files
    assert any(path.is_socket() for path in files)
    # In a folder such as /tmp, which is sticky, he may write, but not replace what is another's.
    readable = 'test -r "$1" || test -w "$1" || { test -w "$2" && ! test -k "$2"; }'
    open_to_him = [path for path in files if as_neighbour(readable, path, path.parent).returncode == 0]
    swap = 'for d in "$1"/*/; do mv "$d" "$1/x" && mkdir "$d" && ln -s "$2" "$d/haproxy.cfg"; done'
    as_neighbour(swap, WELL_KNOWN, victim)
    [ingress] = plain.find(INGRESS)
    os.kill(ingress, signal.SIGKILL)  # HAProxy is told of another one, and its configuration written again
    until_s = time.monotonic() + 30
    while plain.find(INGRESS) in ([], [ingress]):
        assert time.monotonic() < until_s
        time.sleep(0.1)
    time.sleep(5)
    assert (victim.read_text(), open_to_him) == ("important\n", [])
    assert plain.speak() == 200


def test_a_folder_of_his_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="his") as folder:
        os.chown(folder, NEIGHBOUR, NEIGHBOUR)
        assert "belongs to another user" in refusal(environment={"RAY_TMPDIR": folder})


def test_a_folder_in_which_he_may_rename_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="open") as folder:
        os.chmod(folder, 0o777)
        assert "sticky" in refusal(environment={"RAY_TMPDIR": folder})


def test_he_runs_a_server_at_the_same_time(plain: ServerCommand, guarded: Guarded) -> None:
    """Both leave nothing: see their fixtures. His may read all files, as the environment may be root's own."""
    owners = {Path(f"/proc/{server.pid}").stat().st_uid for server in (plain, guarded.server)}
    assert owners == {os.geteuid(), NEIGHBOUR}
    assert (plain.speak(), guarded.server.speak()) == (200, 200)
