"""Generate the parts of a job on a running server and store them in a local folder. Interrupted runs can be resumed.

A part is one text with its request fields, identified by a digest of both. Running the same command again requests only
the parts that are missing from the folder, such as those whose text has changed.
"""

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from deployments.errors import TalkrayError
from serve_app.cli.say import KEY_VARIABLE, RefusedError, http_message

Fields = Mapping[str, object]

_MOST_PARTS, _MOST_BYTES = 1000, 4 << 20  # per job
_PERIOD_S = 1.0  # between two polls of a job
_PATIENCE_S = 300.0  # how long to keep retrying an unresponsive server, which may be restarting
_PAUSE_S = 2.0
_READ_TIMEOUT_S = 120
_AGAIN = (408, 429, 500, 502, 503, 504)
_STATE, _PROBLEMS = "job.json", "problems.json"


class JobFailed(TalkrayError):
    """Raised if the server ended a job before all parts were generated."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Progress of the work: parts fetched, and the server's status for the remaining parts."""

    parts: int
    total: int
    audio_s: float
    eta_s: float | None
    remark: str  # why work has stopped; empty if it is continuing


Report = Callable[[JobProgress], object]


@dataclass(slots=True)
class PartFolder:
    """Folder of fetched parts. `NAME.flac` holds the audio, and `NAME.json` the part's digest, words and segments."""

    folder: Path
    audio_format: str = "flac"

    def audio(self, name: str) -> Path:
        return self.folder / f"{name}.{self.audio_format}"

    def files(self, name: str) -> tuple[Path, Path]:
        return self.audio(name), self.folder / f"{name}.json"

    def told(self, name: str) -> dict[str, Any]:
        """Return a fetched part's `words`, `estimated`, `duration_s` and `segments`."""
        return self._read(f"{name}.json")

    def has(self, name: str, digest: str) -> bool:
        return self.audio(name).exists() and self._read(f"{name}.json").get("digest") == digest

    def keep(self, name: str, digest: str, audio: bytes, told: Mapping[str, object]) -> None:
        """Store a part. The JSON file is written last, because a part without it counts as missing."""
        (self.folder / f"{name}.json").unlink(missing_ok=True)
        write_whole(self.audio(name), audio)
        self._write(f"{name}.json", {**told, "digest": digest})

    def problems(self, name: str) -> list[dict[str, Any]]:
        """Return the part's segments that were regenerated or ended abnormally."""
        found: list[dict[str, Any]] = self._read(_PROBLEMS).get(name, [])
        return found

    def note(self, problems: dict[str, list[dict[str, Any]]]) -> None:
        known = self._read(_PROBLEMS)
        if known | problems != known:
            self._write(_PROBLEMS, known | problems)

    def job(self) -> dict[str, Any]:
        """Return the last job: `id`, the `digests` of its parts, and how often the job was restarted."""
        return self._read(_STATE)

    def begin(self, job: Mapping[str, object]) -> None:
        self._write(_STATE, job)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / name).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        write_whole(self.folder / name, json.dumps(content, ensure_ascii=False).encode())


def write_whole(file: Path, content: bytes) -> None:
    """Replace a file atomically. Raises `RefusedError`."""
    new = file.with_name(f".{file.name}.new")
    try:
        with new.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        new.replace(file)
    except OSError as error:
        raise RefusedError(f"{file} cannot be written: {error.strerror}") from None


def made(folder: Path) -> Path:
    """Create a folder and return its path. Raises `RefusedError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(f"{folder} cannot be created: {error.strerror}") from None
    return folder


@dataclass(slots=True)
class PartList:
    """Texts for a job. The fields in `defaults` apply to each part that does not set its own."""

    defaults: Fields
    parts: Sequence[Fields]  # each has the field `input`
    names: Sequence[str] = ()  # file names of the parts; empty: use the digests
    digests: list[str] = field(init=False)

    def __post_init__(self) -> None:
        """Give identical parts different digests, so that each is spoken."""
        seen: Counter[str] = Counter()
        self.digests = []
        for part in self.parts:
            digest = _digest({**self.defaults, **part})
            seen[digest] += 1
            self.digests.append(digest if seen[digest] == 1 else _digest({"same as": digest, "number": seen[digest]}))
        self.names = self.names or self.digests


def fetch(url: str, work: PartList, folder: PartFolder, report: Report) -> str:
    """Fetch all parts into the folder. Return the server's message about fields that the last job ignored.

    Raises `RefusedError`, or `JobFailed` if the server ends the job early.
    """

    async def run() -> None:
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=_READ_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            await _Following(_Server(url.rstrip("/"), session), work, folder, report).run()

    asyncio.run(run())
    return str(folder.job().get("ignored", ""))


class _Following:
    def __init__(self, server: "_Server", work: PartList, folder: PartFolder, report: Report) -> None:
        self._server, self._work, self._folder, self._report = server, work, folder, report
        numbers = range(len(work.parts))
        self._missing = [number for number in numbers if not folder.has(work.names[number], work.digests[number])]
        self._audio_s = sum(self._length_s(number) for number in set(numbers) - set(self._missing))
        self._chars = {number: len(str(work.parts[number]["input"])) for number in self._missing}

    async def run(self) -> None:
        self._tell({}, [])
        while self._missing:
            await self._follow(await self._job())

    async def _job(self) -> dict[str, Any]:
        """Return the job of an earlier run if it covers the missing parts, else a new job that replaces it."""
        known = self._folder.job()
        wanted = {self._work.digests[number] for number in self._missing}
        if not known or not wanted & set(known["digests"]):
            if known:
                await self._server.forget(known["id"])  # its texts or voice have changed
            return await self._begin(0)
        state = await self._server.state(known["id"])
        if state is not None and state["status"] in ("cancelled", "failed", "paused"):
            state = await self._server.resume(known["id"])
        return await self._begin(known["again"] + 1) if state is None else known

    async def _begin(self, again: int) -> dict[str, Any]:
        """Start a new job. `again` counts earlier jobs for these parts that the server deleted or could not resume."""
        numbers = _batch(self._work, self._missing)
        digests = [self._work.digests[number] for number in numbers]
        body = {**self._work.defaults, "inputs": [self._work.parts[number] for number in numbers]}
        state = await self._server.create(body, _digest({"parts": digests, "again": again}))
        job = {"id": state["id"], "digests": digests, "again": again, "ignored": self._server.ignored}
        self._folder.begin(job)
        return job

    async def _follow(self, job: dict[str, Any]) -> None:
        """Fetch the parts of a job as they become ready. Returns early if the server has deleted the job."""
        own = {digest: number for number, digest in enumerate(self._work.digests)}
        numbers = [own.get(digest) for digest in job["digests"]]  # per part of the job; None if its text has changed
        wanted = set(self._missing)
        left = {part: number for part, number in enumerate(numbers) if number is not None and number in wanted}
        while left:
            state = await self._server.state(job["id"])
            if state is None:
                return
            self._note(state, numbers)
            self._tell(state, left.values())
            num_ready = int(state["parts"]["done"]) - (len(numbers) - len(left))
            if await self._take(job["id"], state, left, num_ready):
                continue
            if state["status"] in ("completed", "failed", "cancelled"):
                raise JobFailed(_gave_up(job["id"], state, len(left)))
            await asyncio.sleep(_PERIOD_S)
        self._note(await self._server.state(job["id"]) or {}, numbers)
        self._tell({}, [])
        await self._server.forget(job["id"])

    async def _take(self, job_id: str, state: Mapping[str, Any], left: dict[int, int], num_ready: int) -> bool:
        """Fetch the parts that are ready and remove them from `left`. Return whether any part was ready."""
        if state["status"] != "completed" and num_ready <= 0:
            return False
        num_taken = 0
        for part, number in list(left.items())[: max(0, num_ready) + _LOOKED_AHEAD]:
            audio = await self._server.audio(job_id, part, self._folder.audio_format)
            if audio is None:
                continue
            told = await self._server.words(job_id, part)
            self._folder.keep(self._work.names[number], self._work.digests[number], audio, told)
            self._audio_s += self._length_s(number)
            self._missing.remove(number)
            del left[part]
            num_taken += 1
            self._tell(state, left.values())
            if num_taken == num_ready:
                break
        return num_taken > 0

    def _length_s(self, number: int) -> float:
        return float(self._folder.told(self._work.names[number]).get("duration_s", 0.0))

    def _note(self, state: Mapping[str, Any], numbers: Sequence[int | None]) -> None:
        found: dict[str, list[dict[str, Any]]] = {}
        for problem in state.get("problems", ()):
            if (number := numbers[problem["part"]]) is not None:
                found.setdefault(self._work.names[number], []).append(problem)
        self._folder.note(found)

    def _tell(self, state: Mapping[str, Any], left: Iterable[int]) -> None:
        """Report progress. The server's estimate for this job is extrapolated to later ones by character count."""
        eta_s, own = state.get("eta_s"), sum(self._chars[number] for number in left)
        if eta_s is not None and own:
            eta_s = float(eta_s) * sum(self._chars[number] for number in self._missing) / own
        total = len(self._work.parts)
        self._report(JobProgress(total - len(self._missing), total, self._audio_s, eta_s, _remark(state)))


_LOOKED_AHEAD = 8  # how many parts may be ready before earlier ones


class _Server:
    """Client for the server's job routes. It retries for _PATIENCE_S if the server does not respond."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self.ignored = ""  # fields that had no effect on the last job, with reasons

    async def create(self, body: Fields, key: str) -> dict[str, Any]:
        made = await self._asked("POST", "", json=body, headers={"Idempotency-Key": key})
        return _json(made)

    async def state(self, job_id: str) -> dict[str, Any] | None:
        """Return the job's status, or None if the server does not have it."""
        return _json_or_none(await self._asked("GET", f"/{job_id}", expected=(404,)))

    async def resume(self, job_id: str) -> dict[str, Any] | None:
        """Resume a job. Return None if it cannot continue."""
        return _json_or_none(await self._asked("POST", f"/{job_id}/resume", expected=(404, 409)))

    async def forget(self, job_id: str) -> None:
        await self._asked("DELETE", f"/{job_id}", expected=(404,))

    async def audio(self, job_id: str, part: int, audio_format: str) -> bytes | None:
        """Return the audio of a part, or None if the part is not finished."""
        return await self._asked("GET", f"/{job_id}/parts/{part}?response_format={audio_format}", expected=(409,))

    async def words(self, job_id: str, part: int) -> dict[str, Any]:
        return _json(await self._asked("GET", f"/{job_id}/parts/{part}/words"))

    async def _asked(self, method: str, path: str, *, expected: Sequence[int] = (), **sent: Any) -> bytes | None:
        """Return the response body, or None if the status is one of `expected`. Raises `RefusedError`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _PATIENCE_S
        while True:
            try:
                async with self._session.request(method, f"{self._url}/v1/audio/jobs{path}", **sent) as answer:
                    content = await answer.read()
                    if answer.status < 300:
                        self.ignored = answer.headers.get("x-ignored", self.ignored)
                        return content
                    if answer.status in expected:
                        return None
                    refused = RefusedError(f"{self._url}: {http_message(answer.status, content)}")
                    if answer.status not in _AGAIN or loop.time() > until_s:
                        raise refused
            except (aiohttp.ClientError, TimeoutError) as error:
                if loop.time() > until_s or (method == "POST" and path == ""):
                    reason = f"{self._url} does not respond like a Talkray server ({error or type(error).__name__})"
                    raise RefusedError(f"{reason}. Start the server, then run the same command again") from None
            await asyncio.sleep(_PAUSE_S)


def _batch(work: PartList, missing: Sequence[int]) -> list[int]:
    """Return the first missing parts, up to the limits of one job."""
    numbers: list[int] = []
    num_bytes = 0
    for number in missing[:_MOST_PARTS]:
        num_bytes += len(json.dumps(work.parts[number]).encode())
        if numbers and num_bytes > _MOST_BYTES:
            break
        numbers.append(number)
    return numbers


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _json(content: bytes | None) -> dict[str, Any]:
    found = json.loads(content or b"null")
    if not isinstance(found, dict):
        raise RefusedError("the response is not a JSON object. Check that the URL is a Talkray server with jobs")
    return found


def _json_or_none(content: bytes | None) -> dict[str, Any] | None:
    return None if content is None else _json(content)


def _remark(state: Mapping[str, Any]) -> str:
    if state.get("status", "running") in ("running", "completed"):
        return ""
    return ": ".join(each for each in (state["status"], state.get("reason")) if each)


def _gave_up(job_id: str, state: Mapping[str, Any], num_left: int) -> str:
    reason = state.get("reason") or "no reason given"
    return f"job {job_id} is {state['status']} and {num_left} parts are missing ({reason}). Run the command again"
