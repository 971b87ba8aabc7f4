"""The `talkray report` command line."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from deployments.errors import InvalidRequest, TalkrayError
from deployments.weights.store import locate
from serve_app.cli.main import ProgressLine
from serve_app.distribution import version
from talkray_tools.arguments import run_command
from talkray_tools.plan.measure import commit, gpu_names, host_name
from talkray_tools.plan.tables import CPU
from talkray_tools.recogniser import Whisper
from talkray_tools.report import page
from talkray_tools.report.bench import ReportBench
from talkray_tools.report.frame import ReportFolder, ReportPart, exit_code, fingerprint, run_parts, secrets_of
from talkray_tools.report.likeness import similarity
from talkray_tools.report.speech import intelligibility, termination
from talkray_tools.report.speed import speed
from talkray_tools.verify import Check

_NUMERICS = ("every code of the codec is finite", "a head follows the text")


def correctness(bench: ReportBench) -> Iterator[Check]:
    """Yield the `talkray verify` checks, except the numerics checks."""
    yield from (check for name, check in bench.verified.items() if name not in _NUMERICS)


def numerics(bench: ReportBench) -> Iterator[Check]:
    """Yield the checks of headroom, precision, near-ties and the alignment head, from that same file."""
    found = bench.verified
    yield from (found[name] for name in _NUMERICS if name in found)
    yield Check("precision of the codec", None, f"{found['it loads'].values.get('codec')}, chosen at the start")
    for name in ("greedy codes are those of float32", "codes drawn with top_k 1 are greedy"):
        if name in found:
            yield replace(found[name], name=f"near-ties: {name}", passed=None)
    noted = locate(bench.options.model) / "talkray.json"
    yield Check("talkray.json", None, noted.read_text(encoding="utf-8") if noted.is_file() else "nothing was written")


_VERIFY = ("quick", "reference", "reference_text")
_SERVER = (*_VERIFY, "voice", "language", "dialect")
PARTS = (
    ReportPart("correctness", correctness, "verify", _VERIFY),
    ReportPart("numerics", numerics, "verify", _VERIFY),
    ReportPart("termination", termination, "termination", (*_SERVER, "prompts"), needs_only_server=True),
    ReportPart(
        "intelligibility", intelligibility, "intelligibility", (*_SERVER, "recogniser", "seed_tts"),
        needs_only_server=True,
    ),
    ReportPart("similarity", similarity, "similarity", (*_SERVER, "recogniser")),
    ReportPart("speed", speed, "speed", _SERVER, needs_only_server=True),
)  # fmt: skip
Recording = Annotated[Path | None, typer.Option(exists=True, help="Recording that a Base checkpoint clones.")]
Compared = Annotated[Path | None, typer.Option(help="report.json of another checkpoint, host or version, to compare.")]
Languages = Annotated[
    list[str] | None, typer.Option(help="Language of the texts. Repeatable. Default: all of the model.")
]
Own = Annotated[str | None, typer.Option(metavar="MODULE:CLASS", help="Your recognizer. Default: Whisper base.")]
Out = Annotated[Path, typer.Option(file_okay=False, help="Folder for the report. The same command resumes.")]


def report(
    model: Annotated[str | None, typer.Option(help="embedded, a checkpoint directory or a Hugging Face name.")] = None,
    out: Out = Path("report"),
    quick: Annotated[bool, typer.Option("--quick", help="Use few samples.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run this part. Repeatable. Default: all.")] = None,
    compare: Compared = None,
    url: Annotated[str | None, typer.Option(help="Running server, for parts that need no checkpoint.")] = None,
    dialect: Annotated[str, typer.Option(help="Request format of the server, as in `talkray loadtest`.")] = "talkray",
    voice: Annotated[str | None, typer.Option(help="Voice. Default: the first of the server.")] = None,
    language: Languages = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Number of short prompts. Default: 1,000.")] = None,
    recogniser: Own = None,
    seed_tts: Annotated[Path | None, typer.Option(help="Folder of the Seed-TTS test set.")] = None,
    reference: Recording = None,
    reference_text: Annotated[str | None, typer.Option(help="Transcript of --reference.")] = None,
) -> None:
    """Assess whether a checkpoint is fit to serve. Writes report.html, report.json and audio.

    Exit code: 0 if all parts passed, 1 if a part failed, 2 if a part could not run.
    """
    given = locals()
    if (model is None) == (url is None):
        raise InvalidRequest("use either --model for a whole report, or --url for the parts that need only a server")
    parts = [part for part in PARTS if model or part.needs_only_server]
    if unknown := set(only or ()) - {part.name for part in parts}:
        names = ", ".join(part.name for part in parts)
        raise InvalidRequest(f"--only {', '.join(sorted(unknown))}: unknown part. Use: {names}")
    if compare is not None:
        page.read(compare)
    options = argparse.Namespace(**given, at_once=32 if gpu_names() else 6)
    directory = locate(model, report=print) if model else None
    secrets = secrets_of(url, os.environ.get("TALKRAY_API_KEY"), out.resolve(), *([directory] if directory else []))
    folder = ReportFolder(out, secrets=secrets)
    paths = {name: fingerprint(given[name]) for name in ("reference", "seed_tts")}
    inputs = given | paths | {"all checkpoint": fingerprint(directory), "all url": url, "all version": commit()}
    out.mkdir(parents=True, exist_ok=True)
    with ProgressLine(sys.stdout) as progress:
        logging.getLogger("talkray_tools").addHandler(_Telling(progress.report))
        logging.getLogger("talkray_tools").setLevel(logging.INFO)
        bench = ReportBench(options, out, progress.report)
        with bench.stack:
            results = run_parts(parts, bench, folder, inputs=inputs, only=only or [part.name for part in parts])
    gpus = gpu_names()
    about = {
        "model": Path(str(model)).name if directory else f"a server ({dialect})",
        "date": datetime.now(UTC).date().isoformat(),
        "version": version(),
        "commit": commit(),
        "machine": host_name(", ".join(gpus) or CPU) if directory else "another machine",
        "quick": quick,
        "recogniser": recogniser or Whisper.name,
    }
    page.write(results, about, folder, compare)
    for result in results:
        print(f"{result.verdict:>13}  {result.name}{result.why and f': {result.why}'}")
    print(f"\nRead {out / 'report.html'}; docs/report.md explains it.")
    raise typer.Exit(exit_code(results))


class _Telling(logging.Handler):
    """Logging handler that prints the messages of listening sessions."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())


def main() -> int:
    """Run the command and return the exit code. Wrong usage exits with 2, too."""
    try:
        return run_command(report, "talkray report", sys.argv[1:])
    except (TalkrayError, OSError) as error:
        print(f"talkray: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
