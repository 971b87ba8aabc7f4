"""The private folder of one running server, which also marks its processes.

Ray's sessions and HAProxy's configuration have well-known paths in /tmp, which belong to the first user that creates
them and which Ray opens to all users. Here each server has a folder that only its user may enter and whose name cannot
be guessed. It is short, because AF_UNIX takes 107 bytes, of which HAProxy's admin socket needs 80 and Ray's sockets 64
below it; it is not in /run/user, which is a small tmpfs, and gone at logout.

Everything that Ray starts writes its output into the folder, also what opens a session of its own (workers), erases
its environment (Ray's agents) or outlives who started it (HAProxy). So a process belongs to a server if it has a file
of the server's folder open for writing (`tail -f` only reads), and a folder with a free lock belongs to a server
that died.
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
_KEPT = ".failed"  # ends the name of the folder that is kept for its logs
_LOCK = "lock"
_LONGEST = 107 - len("/" + 56 * "n" + "/admin.sock.1234567.tmp")  # HAProxy binds this name first; n is the node's id
_POLL_S = 0.02
_PATIENCE_S = 5.0  # a process killed while in the kernel (GPU calls) may take a moment


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One folder, private to this user."""

    path: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables that move every path of /tmp/haproxy-serve into this folder."""
        names = {"CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "admin.sock", "METRICS_SOCKET_PATH": "metrics.sock"}
        names |= {"SERVER_STATE_BASE": "", "SERVER_STATE_FILE": "server-state"}
        return {f"RAY_SERVE_HAPROXY_{name}": str(self.path / file) for name, file in names.items()}

    @property
    def ray(self) -> Path:
        """Ray's own folder, which Ray opens to all users; it is inside ours, which only this user may enter."""
        return self.path / "ray"

    @property
    def driver_log(self) -> Path:
        """The standard error of the process that started Ray."""
        return self.path / "driver.log"

    def processes(self) -> list[int]:
        """Processes that work for this server, except the calling one."""
        processes = {int(process.name): process for process in Path("/proc").glob("[0-9]*")}
        return [number for number, process in processes.items() if number != os.getpid() and self._is_written(process)]

    def _is_written(self, process: Path) -> bool:
        with contextlib.suppress(OSError):  # it may end while we look, or be another user's
            for file in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed since
                    if os.readlink(file).startswith(f"{self.path}/"):
                        flags = (process / "fdinfo" / file.name).read_text().partition("flags:")[2].split()[0]
                        if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                            return True
        return False

    def end_processes(self) -> int:
        """Kill these processes until none is left (one may start another meanwhile); returns how many there were."""
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
        """Keep the unusable folder for its logs; returns its new path if it may contain the reason. Only the latest is
        kept.
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
    """A new folder, locked until the end of the block. First removes the folders of dead servers and reports it."""
    clear_dead(report)
    folder = RunFolder(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent())))  # 0700
    if len(str(folder.path)) > _LONGEST:
        folder.remove()
        raise StartError(f"{parent()} is too long a path for sockets: set RAY_TMPDIR to a shorter one")
    # Another start would take an unlocked folder for a dead server's.
    lock = os.open(folder.path / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder.path / f"{_LOCK}.new").rename(folder.path / _LOCK)
    # systemd-tmpfiles, which removes files of /tmp after some days, leaves a folder with a lock of its own alone.
    in_use = os.open(folder.path, os.O_RDONLY)
    fcntl.flock(in_use, fcntl.LOCK_SH)
    try:
        yield folder
    finally:
        os.close(lock)
        os.close(in_use)


def parent() -> Path:
    """Parent of the servers' folders. Raises StartError if another user could replace our folder with his own."""
    folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp").resolve()
    if not folder.is_dir():
        raise StartError(f"{folder} is not a folder: set RAY_TMPDIR to another one")
    status = folder.stat()
    if status.st_uid not in (0, os.getuid()):
        raise StartError(f"{folder} belongs to another user, who could replace what is in it: set RAY_TMPDIR")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        raise StartError(f"other users may rename files in {folder}: set RAY_TMPDIR, or its sticky bit")
    return folder


def log_folders() -> list[Path]:
    """Folders with the logs of Serve's replicas on this machine: those of our servers, and of a cluster node."""
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
            report(f"cleared what a dead server left in {path} (processes ended: {ended})")


def _ours(pattern: str, folder: Path) -> list[Path]:
    """Matching folders that this user owns; those of other users are ignored."""
    folders = []
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                folders.append(path)
    return folders
