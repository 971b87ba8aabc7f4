"""Run the test suites and benchmarks of other speech servers against Talkray: `make peers PEERS=FOLDER`.

The folder has a clone of each project, named like its repository. Missing projects are listed as not run. Suites run
unmodified in the environment `.peers`, except that one of our voices replaces Kokoro's voices. Failures in
`BY_DESIGN` are printed with their reasons. Any other failure results in exit status 1.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from serve_app.config import AppConfig
from tools.suites.application import running

PYTHON = Path(".peers/bin/python")
PACKAGES = ("pytest", "httpx", "openai", "requests", "aiohttp", "numpy", "tqdm", "click", "jiwer", "pydantic")
PACKAGES += ("whisper-normalizer", "faster-whisper")
VOICE = "nora"
TEXTS = ("Hello, this is a simple test.", "The rain in Spain falls mainly on the plain.", "Good morning.")
SUITE_S = 1500.0
NO_FOLDER = """PEERS names no folder. Clone the suites into one, and run `make peers PEERS=FOLDER`:
{clones}
Set WHISPER_MODEL to a Whisper model of faster-whisper for Kokoro-FastAPI's tests that transcribe."""

# By suite: patterns of tests that fail by design, with reasons.
BY_DESIGN = {
    "Kokoro-FastAPI": {
        r"roundtrip\[\w+-(es|fr|it|pt|hi|ja|zh)\]": "the embedded voice speaks English only",
        r"rate_tag|alias_rate|prosody_rate": "its tags, aliases in a request and /dev/ssml are not supported",
    },
    "sglang-omni": {r"^streamed": "it expects its own events with a WAV file in each, but Talkray streams raw audio"},
    "chatterbox-tts-api": {
        r"upload": "/v1/audio/speech/upload is not supported: send JSON, or store the voice",
        r"missing_input|empty_input|parameter_range": "a bad field is a 400, as in OpenAI's API, not a 422",
        r"text_too_long|documentation": "a text may have 4,096 characters; there is no /redoc, /docs has the API",
    },
}


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Outcome of one test, or of one request of a benchmark."""

    name: str
    outcome: str  # "passed", "failed" or "not run"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """Test suite of one project. `run` receives the suite's folder, an empty folder, and the server's URL."""

    name: str
    repository: str
    needs: str  # path in the repository
    run: Callable[[Path, Path, str], Iterator[PeerResult]]


def kokoro(folder: Path, work: Path, url: str) -> Iterator[PeerResult]:
    """Run the integration tests with our voice."""
    for file in (folder / "api/tests/integration").glob("*.py"):
        (work / file.name).write_text(re.sub(r"\b[a-z][fm]_[a-z]+", VOICE, _one_voice_a_name(file.read_text())))
    heard = os.environ.get("WHISPER_MODEL")
    if not heard:
        yield PeerResult("test_tts_roundtrip", "not run", "WHISPER_MODEL is not set")
    yield from _pytest(work, url, *([] if heard else ["--ignore", "test_tts_roundtrip.py"]))


def _one_voice_a_name(source: str) -> str:
    """Replace the voices of parametrized cases with our voice."""
    return source.replace('ids=lambda c: f"{c.voice}-{c.lang}"', 'ids=lambda c: f"voice-{c.lang}"')


def chatterbox(folder: Path, work: Path, url: str) -> Iterator[PeerResult]:
    for name in ("conftest.py", "test_api.py"):
        (work / name).write_text((folder / "tests" / name).read_text())
    yield from _pytest(work, url, "--runslow")


def _pytest(work: Path, url: str, *options: str) -> Iterator[PeerResult]:
    report = work / "report.xml"
    _run([str(PYTHON.absolute()), "-m", "pytest", "-q", f"--junitxml={report}", *options], work, url)
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        skipped = case.find("skipped")
        outcome = "failed" if bad is not None else "not run" if skipped is not None else "passed"
        reason = bad if bad is not None else skipped
        yield PeerResult(case.get("name", ""), outcome, "" if reason is None else reason.get("message", "")[:200])


def sglang(folder: Path, work: Path, url: str) -> Iterator[PeerResult]:
    """Run `benchmark_tts_speed` without recordings, with complete and with streamed responses."""
    (work / "meta.lst").write_text("".join(f"{number}|x|x.wav|{text}\n" for number, text in enumerate(TEXTS)))
    script = str(folder / "benchmarks/eval/benchmark_tts_speed.py")
    for mode in ([], ["--stream"]):
        output = work / f"results{len(mode)}"
        options = ["--model", "tts-1", "--base-url", url, "--testset", str(work / "meta.lst"), "--no-ref-audio"]
        _run([str(PYTHON.absolute()), script, *options, "--output-dir", str(output), *mode], work, url)
        results = output / "speed_results.json"
        for request in json.loads(results.read_text())["per_request"] if results.exists() else [{"id": "all"}]:
            name = f"{'streamed' if mode else 'whole'}-{request['id']}"
            yield PeerResult(name, "passed" if request.get("is_success") else "failed", str(request.get("error"))[:200])


def voxserve(folder: Path, work: Path, url: str) -> Iterator[PeerResult]:
    """Run `goodput` with its fixed text, which needs no data set."""
    (work / "datasets.py").write_text("DatasetDict = load_dataset = None\n")
    script, port = str(folder / "benchmark/goodput.py"), url.rpartition(":")[2]
    options = ["--host", "127.0.0.1", "--port", port, "--rate", "0.2", "--duration", "20"]
    printed = _run([str(PYTHON.absolute()), script, *options], work, url, PYTHONPATH=str(work))
    counts = {name: int(count) for name, count in re.findall(r"(Successful|Failed)[^:|\d]*[:|]\s*(\d+)", printed)}
    for name, outcome in (("Successful", "passed"), ("Failed", "failed")):
        yield from (PeerResult(f"request-{number}", outcome) for number in range(counts.get(name, 0)))
    if not counts:
        yield PeerResult("goodput", "failed", printed[-200:])


def nari(folder: Path, work: Path, url: str) -> Iterator[PeerResult]:
    """Run `tts_bench` with each of its supported server types."""
    (work / "texts.jsonl").write_text("".join(json.dumps({"id": text[:9], "text": text}) + "\n" for text in TEXTS))
    for target, transport in (*((each, "http") for each in _TARGETS), ("nari", "websocket")):
        output = work / f"{target}-{transport}"
        options = ["--target", target, "--transport", transport, "--base-url", url, "--model", "tts-1"]
        options += ["--voice", VOICE, "--dataset", str(work / "texts.jsonl"), "--rps", "0.2", "--warmup", "0s"]
        command = [str(PYTHON.absolute()), "-m", "tts_bench", "run", *options, "--duration", "15s"]
        printed = _run([*command, "--output", str(output)], work, url, PYTHONPATH=str(folder / "tts_bench/src"))
        records = output / "requests.jsonl"
        lines = records.read_text().splitlines() if records.exists() else []
        for request in map(json.loads, lines):
            name = f"{target}-{transport}-{request.get('sample_id', request.get('request_id'))}"
            reason = f"{request.get('error_kind')}: {request.get('error_message')}"[:200]
            yield PeerResult(name, "passed" if request.get("success") else "failed", reason)
        if not lines:
            yield PeerResult(f"{target}-{transport}", "failed", printed[-200:])


_TARGETS = ("vllm-omni", "sglang-omni", "voxserve", "nari")
SUITES = (
    Suite("Kokoro-FastAPI", "remsky/Kokoro-FastAPI", "api/tests/integration", kokoro),
    Suite("chatterbox-tts-api", "travisvn/chatterbox-tts-api", "tests/test_api.py", chatterbox),
    Suite("sglang-omni", "sgl-project/sglang-omni", "benchmarks/eval/benchmark_tts_speed.py", sglang),
    Suite("vox-serve", "vox-serve/vox-serve", "benchmark/goodput.py", voxserve),
    Suite("benchmarks", "nari-labs/benchmarks", "tts_bench/src/tts_bench", nari),
)


def _run(command: list[str], work: Path, url: str, **variables: str) -> str:
    """Run a command and return its output."""
    addresses = dict.fromkeys(("KOKORO_BASE_URL", "CHATTERBOX_TEST_URL"), url)
    environment = {**os.environ, **addresses, "NO_PROXY": "127.0.0.1", **variables}
    pipe, joined = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(
        command, cwd=work, env=environment, stdout=pipe, stderr=joined, text=True, timeout=SUITE_S, check=False
    )
    (work / f"{len(list(work.iterdir()))}.log").write_text(done.stdout)
    return done.stdout


def reason_of(suite: str, result: PeerResult) -> str | None:
    """Return the reason why a failure is by design, or None."""
    known = BY_DESIGN.get(suite, {})
    return next((reason for pattern, reason in known.items() if re.search(pattern, result.name)), None)


def run_all(folder: Path, url: str) -> int:
    """Run all suites that are present, print failures, and return the exit status."""
    num_unexpected = 0
    for suite in SUITES:
        home = folder / suite.repository.rpartition("/")[2]
        if not (home / suite.needs).exists():
            print(f"{suite.repository}: not run, {home / suite.needs} is not there", flush=True)
            continue
        results = list(suite.run(home.absolute(), Path(tempfile.mkdtemp(prefix="peers-")), url))
        counts = {
            outcome: sum(each.outcome == outcome for each in results) for outcome in ("passed", "failed", "not run")
        }
        print(
            f"{suite.repository}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()), flush=True
        )
        for result in results:
            if result.outcome != "passed":
                reason = reason_of(suite.name, result) if result.outcome == "failed" else result.detail
                num_unexpected += reason is None
                print(f"  {result.outcome}: {result.name}: {reason or 'UNEXPECTED: ' + result.detail}", flush=True)
    print(f"{num_unexpected} unexpected failures")
    return min(num_unexpected, 1)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="folder with a clone of each project")
    parser.add_argument("--url", help="URL of a server with the embedded voice; default: start one")
    options = parser.parse_args(arguments)
    if options.folder is None or not options.folder.is_dir():
        clones = "\n".join(f"  git clone https://github.com/{suite.repository}" for suite in SUITES)
        print(NO_FOLDER.format(clones=clones), file=sys.stderr)
        return 2
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", PYTHON.parents[1]], check=True)
        subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    if options.url:
        return run_all(options.folder, options.url.rstrip("/"))
    with running(AppConfig(model="embedded")) as url:
        return run_all(options.folder, url)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
