"""A repository of the Hugging Face hub into its cache.

The hub's own client starts a broken file over and compares sizes only. Here what has arrived is kept, in the cache
under the name that the client gives it too, and every file is compared with the hash that the hub has of it. One
process downloads a repository, others wait for it.
"""

import errno
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from filelock import Timeout
from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import (
    WeakFileLock,
    build_hf_headers,
    disable_progress_bars,
    get_session,
    hf_raise_for_status,
)

from deployments.errors import CheckpointError

# A connection that brings nothing is tried again so often; one that brings something always is.
_ATTEMPTS = 6
_LONGEST_PAUSE_S = 10.0
_REPORT_S = 1.0
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Transfer:
    """How far a download is, or the check of one of its files."""

    what: str
    done: int = 0  # bytes
    total: int = 0
    bytes_per_s: float = 0.0

    def __str__(self) -> str:
        if not self.total:
            return self.what
        rate = f", {size_text(self.bytes_per_s)}/s, {self._left()} left" if self.bytes_per_s else ""
        return f"{self.what}: {size_text(self.done)} of {size_text(self.total)}{rate}"

    def _left(self) -> str:
        minutes, seconds = divmod(round((self.total - self.done) / self.bytes_per_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


Report = Callable[[Transfer], None]


def size_text(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}" if num_bytes < 1e3 * size else f"{num_bytes / size:.0f} {unit}"
    return f"{num_bytes:.0f} B"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository."""

    path: str
    size: int
    digest: str  # hexadecimal: SHA-256 where git LFS keeps the file, else git's SHA-1

    def hashed(self, file: Path, heard: Callable[[int], None]) -> str:
        """The digest that `file` has; `heard` is told how many bytes more have been read."""
        state = hashlib.sha256() if self.kind == "SHA-256" else hashlib.sha1(b"blob %d\0" % file.stat().st_size)
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE_BYTES):
                state.update(piece)
                heard(len(piece))
        return state.hexdigest()

    @property
    def kind(self) -> str:
        return "SHA-256" if len(self.digest) == 64 else "git SHA-1"


class _Meter:
    """Tells once a second how far something is."""

    def __init__(self, what: str, total: int, report: Report, *, done: int = 0) -> None:
        self._what, self._total, self._report, self._done = what, total, report, done
        self._began_s = self._last_s = time.perf_counter()
        self._fresh = 0

    def add(self, num_bytes: int) -> None:
        """So many bytes more are done; fewer than 0 come once more."""
        self._done += num_bytes
        self._fresh += max(num_bytes, 0)
        if time.perf_counter() - self._last_s >= _REPORT_S:
            self.say()

    def say(self, note: str = "") -> None:
        self._last_s = time.perf_counter()
        rate = self._fresh / max(self._last_s - self._began_s, 1e-6)
        self._report(Transfer(self._what + note, self._done, self._total, rate))


def download(
    name: str, revision: str | None, check: Callable[[set[str], Callable[[str], Path]], None], report: Report
) -> Path:
    """The directory of repository `name` in the cache, once all of it is there.

    `check` gets the names of its files, and a function that fetches one of the small ones: it raises CheckpointError
    where the rest is not worth a download. Raises CheckpointError for a full disk, a connection that stays broken and
    a wrong hash, OSError or httpx2.HTTPError where the hub does not answer or refuses.
    """
    disable_progress_bars()  # the client's own
    report(Transfer(f"asking {constants.ENDPOINT} for {name}"))
    info = HfApi().model_info(name, revision=revision, files_metadata=True)
    siblings = info.siblings or []
    files = {f.rfilename: RemoteFile(f.rfilename, f.size or 0, _digest(f)) for f in siblings}
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    blobs = folder / "blobs"

    def fetch(path: str) -> Path:
        _Download(name, info.sha or "main", blobs, lambda transfer: None).run([files[path]])
        return blobs / files[path].digest

    with _alone(folder, name, report):
        check(set(files), fetch)
        _Download(name, info.sha or "main", blobs, report).run(list(files.values()))
    return Path(snapshot_download(name, revision=revision))  # all it does is to link the files


def _digest(file: RepoSibling) -> str:
    return (file.lfs.sha256 if file.lfs else file.blob_id) or ""


@contextmanager
def _alone(folder: Path, name: str, report: Report) -> Iterator[None]:
    """Wait until no other process downloads the same; one that dies leaves what it has to the next."""
    lock = folder.parent / ".locks" / folder.name / "talkray.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            with WeakFileLock(lock, timeout=1.0):
                yield
                return
        except Timeout:
            report(Transfer(f"waiting for another process, which downloads {name}"))


class _Download:
    """The missing files of one repository, one after the other."""

    def __init__(self, name: str, revision: str, folder: Path, report: Report) -> None:
        self._name, self._revision, self._folder, self._report = name, revision, folder, report

    def run(self, files: list[RemoteFile]) -> None:
        """Fetch what is missing of `files`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        missing = {file.digest: file for file in files if not (self._folder / file.digest).exists()}.values()
        if not missing:
            return
        have, total = sum(_size(self._part(file)) for file in missing), sum(file.size for file in missing)
        free = shutil.disk_usage(self._folder).free
        if free < total - have:
            raise self._too_full(f"{size_text(total - have)} more, and {size_text(free)} are free")
        meter = _Meter(f"downloading {self._name}", total, self._report, done=have)
        meter.say()
        for file in sorted(missing, key=lambda file: file.size):
            try:
                self._fetch(file, meter)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise self._too_full(f"{size_text(file.size)} for {file.path}") from error
        meter.say()

    def _part(self, file: RemoteFile) -> Path:
        return self._folder / f"{file.digest}.incomplete"

    def _fetch(self, file: RemoteFile, meter: _Meter) -> None:
        part = self._part(file)
        self._receive(file, part, meter)
        checking = _Meter(f"checking {file.path}", file.size, self._report)
        found = file.hashed(part, checking.add)
        if found != file.digest:
            part.unlink()
            raise CheckpointError(
                f"{file.path} of {self._name} did not arrive as the hub has it: its {file.kind} is {found}, the hub"
                f" says {file.digest}. It was deleted: start again, and if it comes like this once more ask who runs"
                f" the proxy or mirror behind {constants.ENDPOINT}"
            )
        part.rename(self._folder / file.digest)

    def _receive(self, file: RemoteFile, part: Path, meter: _Meter) -> None:
        """Bring `part` to its full size, over as many connections as it takes."""
        failures = 0
        while (have := _size(part)) < file.size or not part.exists():
            reason = self._receive_once(file, part, have, meter)
            if reason is None:
                return
            failures = 0 if _size(part) > have else failures + 1
            if failures == _ATTEMPTS:
                raise CheckpointError(
                    f"{self._name} could not be downloaded from {constants.ENDPOINT}: {reason}. What has arrived is"
                    f" kept in {self._folder}: check the network and start again, it goes on from there"
                )
            meter.say(" (the connection broke, going on)")
            time.sleep(min(2.0 ** (failures - 1), _LONGEST_PAUSE_S) if failures else 0.0)

    def _receive_once(self, file: RemoteFile, part: Path, have: int, meter: _Meter) -> str | None:
        """Append to `part` until the connection ends; returns why it ended too early."""
        url = hf_hub_url(self._name, file.path, revision=self._revision)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        try:
            with (
                part.open("ab") as out,
                get_session().stream("GET", url, headers=headers, timeout=timeout_s, follow_redirects=True) as response,
            ):
                hf_raise_for_status(response)
                if have and response.status_code != 206:  # it starts over
                    out.truncate(0)
                    meter.add(-have)
                for piece in response.iter_bytes():
                    out.write(piece)
                    meter.add(len(piece))
        except httpx2.TransportError as error:
            return str(error) or type(error).__name__
        except HfHubHTTPError as error:
            if error.response.status_code < 500 and error.response.status_code != 429:
                raise
            return f"HTTP {error.response.status_code}"
        return None if _size(part) >= file.size else f"{file.path} ended after {_size(part)} of {file.size} bytes"

    def _too_full(self, needs: str) -> CheckpointError:
        return CheckpointError(
            f"the disk is full: {self._name} needs {needs} in {self._folder}: make room, or set HF_HOME to a folder on"
            " another disk. What has arrived is kept, the next start goes on from there"
        )


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
