import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.errors import StartError
from serve_app.cli.serve import run_folder
from serve_app.cli.serve.run_folder import RunFolder, created

WRITES = "import sys, time; print('up', flush=True); time.sleep(600)"


@pytest.fixture
def parent(servers_folder: Path) -> Path:
    return servers_folder


def writer(folder: RunFolder) -> "subprocess.Popen[bytes]":
    """A process that has erased its environment and left its session, but writes its output to the folder."""
    output = folder.path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", WRITES], stdout=file, env={}, start_new_session=True)
    while not output.read_bytes():
        pass
    return process


def test_only_its_user_may_enter(parent: Path) -> None:
    """And systemd-tmpfiles passes over a folder that it cannot lock, with all that is in it."""
    with created(print) as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert folder.path.parent == parent
        assert all(path.startswith(f"{folder.path}") for path in folder.environment.values())
        opened = os.open(folder.path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(opened)


def test_a_long_path_is_refused(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = parent / "long-enough-to-be-too-long"
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with pytest.raises(StartError, match="too long"), created(print):
        pass
    assert not list(long.iterdir())
    assert len("/tmp/talkray-12345678") <= run_folder._LONGEST


def test_a_missing_folder_or_one_that_others_write_to_is_refused(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent.chmod(0o777)
    with pytest.raises(StartError, match="sticky"), created(print):
        pass
    parent.chmod(0o1777)
    with created(print):
        pass
    monkeypatch.setenv("RAY_TMPDIR", str(parent / "no"))
    with pytest.raises(StartError, match="is not a folder"), created(print):
        pass


def test_who_writes_there_is_ended_and_who_reads_is_not(parent: Path) -> None:
    with created(print) as folder, (folder.path / "log").open("w"), writer(folder) as process:
        with (folder.path / "log").open() as log, subprocess.Popen(["sleep", "600"], stdin=log) as reader:
            assert folder.processes() == [process.pid]
            assert folder.end_processes() == 1
            assert reader.poll() is None
            reader.kill()
        assert folder.processes() == []


def test_processes_that_start_meanwhile_are_ended_too(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, killed = iter([[7, 8], [9], []]), list[int]()
    with created(print) as folder, monkeypatch.context() as patched:
        patched.setattr(RunFolder, "processes", lambda _: next(rounds))
        patched.setattr(os, "kill", lambda process, _: killed.append(process))
        assert folder.end_processes() == 3
    assert killed == [7, 8, 9]


def test_what_a_dead_server_left_is_cleared_and_its_logs_are_kept(parent: Path) -> None:
    with created(print) as dead:
        (dead.path / "ray").mkdir()
    reports: list[str] = []
    with writer(dead) as process, created(reports.append) as alive:
        assert process.wait(5) < 0
        assert reports == [f"cleaned up after a dead server in {dead.path} (processes ended: 1)"]
        assert {*parent.iterdir()} == {alive.path, Path(f"{dead.path}.failed")}
        with created(reports.append):  # a second server beside it
            pass
    assert len(reports) == 1


def test_only_the_latest_logs_are_kept(parent: Path) -> None:
    with created(print) as folder:
        assert folder.keep_logs() is None
    assert not list(parent.iterdir())
    kept = []
    for _ in range(3):
        with created(print) as folder:
            (folder.path / "ray").mkdir()
            kept.append(folder.keep_logs())
    assert [*parent.iterdir()] == [kept[-1]]


def test_folders_of_another_kind_are_left_alone(parent: Path) -> None:
    (parent / "talkray-older").mkdir()
    (parent / "talkray-file").touch()
    (parent / "talkray-link").symlink_to(parent)
    before = {*parent.iterdir()}
    with created(print) as folder:
        folder.remove()
    assert {*parent.iterdir()} == before


def test_the_folder_of_another_user_is_none_of_ours(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with created(print) as folder:
        pass
    parent.chmod(0o1777)
    monkeypatch.setattr(run_folder, "parent", lambda: parent)
    monkeypatch.setattr(run_folder.os, "getuid", lambda: os.geteuid() + 1)
    run_folder.clear_dead(pytest.fail)
    assert folder.path.exists()
