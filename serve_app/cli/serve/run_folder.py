"""Private folder of a running server, which also serves to identify its processes.

By default, Ray's sessions and HAProxy's configuration have well-known paths in /tmp. These belong to the first user who
creates them, and Ray opens them to all users. Talkray gives each server a folder with a random name that only its user
may enter. The path is short, because a Unix socket's path is limited to 107 bytes; below the folder, HAProxy's admin
socket needs 80 and Ray's sockets 64. The folder is not in /run/user, which is a small tmpfs and is removed at logout.

All processes that Ray starts write their output into the folder. This includes processes that open a new session
(workers), clear their environment (Ray's agents) or outlive their parent (HAProxy). A process therefore belongs to a
server if it has a file in the server's folder open for writing (`tail -f` only reads). A folder whose lock is free
belongs to a dead server.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deployments.errors import StartError

_PREFIX = "talkray-"
_KEPT = ".failed"  # suffix of folders kept for their logs
_LOCK = "lock"
_LONGEST = 107 - len("/" + 56 * "n" + "/admin.sock.1234567.tmp")  # HAProxy binds this name first; n is the node's id
_POLL_S = 0.02
_PATIENCE_S = 5.0  # a killed process may take a moment to leave the kernel (GPU calls)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Folder of one server, private to this user."""

    path: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that move every path from /tmp/haproxy-serve into this folder."""
        names = {"CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "admin.sock", "METRICS_SOCKET_PATH": "metrics.sock"}
        names |= {"SERVER_STATE_BASE": "", "SERVER_STATE_FILE": "server-state"}
        return {f"RAY_SERVE_HAPROXY_{name}": str(self.path / file) for name, file in names.items()}

    @property
    def ray(self) -> Path:
        """Ray's own folder. Ray opens it to all users, but the enclosing folder admits only this user."""
        return self.path / "ray"

    @property
    def driver_log(self) -> Path:
        """Standard error of the process that started Ray."""
        return self.path / "driver.log"

    def processes(self) -> list[int]:
        """Return the process ids of this server, except for the calling process."""
        processes = {int(process.name): process for process in Path("/proc").glob("[0-9]*")}
        return [number for number, process in processes.items() if number != os.getpid() and self._is_written(process)]

    def _is_written(self, process: Path) -> bool:
        with contextlib.suppress(OSError):  # the process may end at any moment, or belong to another user
            for file in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                    if os.readlink(file).startswith(f"{self.path}/"):
                        flags = (process / "fdinfo" / file.name).read_text().partition("flags:")[2].split()[0]
                        if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                            return True
        return False

    def end_processes(self) -> int:
        """Kill the server's processes until none are left, because they may start more. Return how many there were."""
        ended: set[int] = set()
        until_s = time.monotonic() + _PATIENCE_S
        while (left := self.processes()) and time.monotonic() < until_s:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            ended.update(left)
            time.sleep(_POLL_S)
        return len(ended)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def keep_logs(self) -> Path | None:
        """Keep the folder of a failed server for its logs, and return its new path if it contains logs. Only the latest
        folder is kept.
        """
        if not self.ray.exists():
            self.remove()
            return None
        for earlier in _ours(f"{_PREFIX}*{_KEPT}", self.path.parent):
            shutil.rmtree(earlier, ignore_errors=True)
        (self.path / _LOCK).unlink(missing_ok=True)
        return self.path.rename(f"{self.path}{_KEPT}")


@contextlib.contextmanager
def created(report: Callable[[str], None]) -> Iterator[RunFolder]:
    """Create a folder that is locked until the context ends. First removes and reports dead servers' folders."""
    clear_dead(report)
    folder = RunFolder(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent())))  # 0700
    if len(str(folder.path)) > _LONGEST:
        folder.remove()
        raise StartError(f"the path {parent()} is too long for sockets: set RAY_TMPDIR to a shorter path")
    # Another server starting up would treat an unlocked folder as a dead server's.
    lock = os.open(folder.path / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder.path / f"{_LOCK}.new").rename(folder.path / _LOCK)
    # systemd-tmpfiles removes old files from /tmp, but skips folders that are themselves locked.
    in_use = os.open(folder.path, os.O_RDONLY)
    fcntl.flock(in_use, fcntl.LOCK_SH)
    try:
        yield folder
    finally:
        os.close(lock)
        os.close(in_use)


def parent() -> Path:
    """Return the parent of the servers' folders. Raises StartError if another user could replace a server's folder."""
    folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp").resolve()
    if not folder.is_dir():
        raise StartError(f"{folder} is not a folder: set RAY_TMPDIR to an existing folder")
    status = folder.stat()
    if status.st_uid not in (0, os.getuid()):
        raise StartError(f"{folder} belongs to another user, who could replace its contents: change RAY_TMPDIR")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        raise StartError(f"other users may rename files in {folder}: change RAY_TMPDIR, or set the sticky bit")
    return folder


def log_folders() -> list[Path]:
    """Return the log folders of Serve's replicas on this machine, for local servers and for a cluster node."""
    servers = [folder / "ray" for folder in _ours(f"{_PREFIX}*", parent())]
    return [logs for ray in (*servers, parent() / "ray") for logs in sorted(ray.glob("session_2*/logs/serve"))]


def clear_dead(report: Callable[[str], None]) -> None:
    """End the processes that dead servers of this user left behind."""
    for path in _ours(f"{_PREFIX}*", parent()):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), (path / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = RunFolder(path)
            ended = folder.end_processes()
            folder.keep_logs()
            report(f"cleaned up after a dead server in {path} (processes ended: {ended})")


def _ours(pattern: str, folder: Path) -> list[Path]:
    """Return matching folders that this user owns."""
    folders = []
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                folders.append(path)
    return folders
