"""`talkray voice`: the stored voices of a folder or a bucket. Running servers follow it within seconds."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from deployments.errors import InvalidRequest, StartError
from serve_app.audio.recordings import Preparation
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.extensions.voices.voice_check import show_advice
from serve_app.extensions.voices.voice_check import voices as voices

if TYPE_CHECKING:  # they import what decodes recordings
    from serve_app.extensions.voices.library import Voices
    from serve_app.extensions.voices.stored_voice import StoredVoice

T = TypeVar("T")

_AUDIO = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac", ".webm")
_TEXT = "Hello, this is how I sound."

Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="TALKRAY_VOICES",
        help="Where voices lie, as api.voices.store has it. Without: this user's folder.",
    ),
]
Owner = Annotated[str, typer.Option(help="The name of the API key whose voice it is; none without keys.")]
VoiceName = Annotated[str, typer.Argument(metavar="VOICE", help="Its id or name.")]
Transcript = Annotated[str | None, typer.Option("--text", help="What it says. Without, only the sound is cloned.")]
Prepare = Annotated[
    Preparation, typer.Option(help="auto: trimmed, at a common loudness, with silence behind it. none: as it is.")
]
Statement = Annotated[
    str | None, typer.Option(help="What the speaker agreed to, and how; or the id of a stored consent recording.")
]


@voices.command()
def add(
    name: Annotated[str, typer.Argument(help="Its name.")],
    file: Annotated[Path, typer.Argument(help="A recording of half a second to thirty.")],
    text: Transcript = None,
    style: Annotated[str | None, typer.Option(help="Add the recording to this voice, in this style.")] = None,
    language: Annotated[str | None, typer.Option(help="For requests that name none.")] = None,
    prepare: Prepare = "auto",
    consent: Statement = None,
    owner: Owner = "",
    store: Store = None,
) -> None:
    """Store a voice, or with --style a further recording of one."""
    from serve_app.extensions.voices.stored_voice import NEUTRAL, Details, SentRecording

    sent = SentRecording(read_file(file), text, style=style or NEUTRAL, prepare=prepare)

    async def work(stored: "Voices") -> "StoredVoice":
        if style is not None:
            return await stored.change(await stored.get(name), {}, added=[sent], field=str(file))
        details = Details(name, language=language, consent=consent, provenance="command")
        return await stored.add(details, [sent], field=str(file))

    voice = with_voices(store, owner, work)
    print(_line(voice))
    show_advice(voice.takes[-1])


@voices.command("list")
def list_voices(store: Store = None) -> None:
    """Print id, name, owner, length and styles of every voice."""

    async def work(stored: "Voices") -> "list[StoredVoice]":
        await stored.refresh()
        return await stored.voices()

    for voice in with_voices(store, "", work):
        print(_line(voice))


@voices.command()
def show(voice: VoiceName, store: Store = None) -> None:
    """Print all that is known of a voice."""
    print(with_voices(store, "", lambda stored: stored.get(voice)).model_dump_json(indent=1))


@voices.command()
def rename(voice: VoiceName, name: Annotated[str, typer.Argument(help="Its new name.")], store: Store = None) -> None:
    """Give a voice another name; its id stays."""

    async def work(stored: "Voices") -> "StoredVoice":
        return await stored.change(await stored.get(voice), {"name": name})

    print(_line(with_voices(store, "", work)))


@voices.command()
def remove(voice: VoiceName, store: Store = None) -> None:
    """Delete a voice; running servers have forgotten it within five seconds."""

    async def work(stored: "Voices") -> "StoredVoice":
        removed = await stored.get(voice)
        await stored.remove(removed)
        return removed

    print(f"deleted {_line(with_voices(store, '', work))}")


@voices.command()
def export(
    voice: VoiceName,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file. Without: NAME.voice.")] = None,
    store: Store = None,
) -> None:
    """Write a voice with its recordings to one file."""
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
    source: Annotated[Path, typer.Argument(help="A file of `export`, or a folder of recordings beside their .txt.")],
    prepare: Annotated[
        Preparation | None, typer.Option(help="Of a folder's recordings: auto, as without it, or none.")
    ] = None,
    consent: Statement = None,
    owner: Owner = "",
    store: Store = None,
) -> None:
    """Store the voice of a file, or a voice for each recording of a folder, named as its file."""
    from serve_app.extensions.voices.stored_voice import Details, SentRecording, unpack

    async def from_file(stored: "Voices") -> "list[StoredVoice]":
        voice, files = unpack(source)
        return [await stored.keep(voice.changed(owner=owner), files)]

    async def from_folder(stored: "Voices") -> "list[StoredVoice]":
        recordings = sorted(file for file in source.iterdir() if file.suffix.lower() in _AUDIO)
        if not recordings:
            raise InvalidRequest(f"{source} has no recordings ({', '.join(_AUDIO)})", "source")
        added = []
        for file in recordings:
            words = file.with_suffix(".txt")
            text = read_file(words).decode("utf-8", "replace") if words.exists() else None
            sent = SentRecording(read_file(file), text, prepare=prepare or "auto")
            details = Details(file.stem, consent=consent, provenance="import")
            added.append(await stored.add(details, [sent], field=str(file)))
        return added

    if prepare is not None and not source.is_dir():
        raise InvalidRequest("--prepare is for a folder: a voice in a file was prepared when it was stored", "prepare")
    for voice in with_voices(store, owner, from_folder if source.is_dir() else from_file):
        print(_line(voice))
        if source.is_dir():
            show_advice(voice.takes[0])


@voices.command()
def preview(
    voice: VoiceName,
    text: Annotated[str, typer.Argument(help="What it says.")] = _TEXT,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A file. Without: it is played.")] = None,
    url: Annotated[str | None, typer.Option(help="A server. Without: the one that runs here.")] = None,
) -> None:
    """Let a running server speak with a voice. TALKRAY_API_KEY is sent where it is set."""
    from serve_app.cli.say import SayRequest, play_speech, running_server, write_speech

    server = running_server(url)
    asked = SayRequest(text, voice)
    print(play_speech(server, asked) if output is None else write_speech(server, asked, output))


def with_voices(store: str | None, owner: str, work: "Callable[[Voices], Awaitable[T]]") -> T:
    """The result of `work` with the voices of all owners; what it makes is `owner`'s."""
    from serve_app.extensions.voices.opening import open_voices
    from serve_app.visitor import VISITOR, Visitor

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
    owner = f"of {voice.owner}" if voice.owner else "of everybody"
    takes = ", ".join(f"{take.style} {take.seconds:.1f} s" for take in voice.takes)
    way = "" if voice.takes[0].text else ", by vector only: it has no transcript"
    return f"{voice.id}  {voice.name:<20} {owner}  {takes}{way}"
