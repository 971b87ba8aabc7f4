"""Commands `talkray voice design` and `talkray voice lock`, which design voices on a running server and store them."""

import base64
import sys
from pathlib import Path
from typing import Annotated

import typer

from deployments.errors import InvalidRequest, StartError
from serve_app.cli.say import RefusedError, ask, play, running_server
from serve_app.extensions.voices.voice_commands import voices

Server = Annotated[str | None, typer.Option("--url", "--server", help="Server URL. Default: your newest server.")]


@voices.command()
def design(
    description: Annotated[str, typer.Argument(help='Description of the voice, such as "A calm old man".')],
    text: Annotated[str | None, typer.Option(help="Text to speak. Default: a sentence in the language.")] = None,
    language: Annotated[str | None, typer.Option(help="Language of the candidates.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed. The same seed gives the same voices.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for design-1.wav and so on.")] = Path(),
    lock: Annotated[int | None, typer.Option(min=1, max=3, help="Store this candidate under --name.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the stored candidate.")] = None,
    url: Server = None,
) -> None:
    """Design three voices from a description. On a terminal, play the candidates and choose one to store."""
    if lock is not None and name is None:
        raise InvalidRequest("--lock requires --name, the name of the voice", "name")
    server = running_server(url)
    fields = {"instructions": description, "text": text, "language": language, "seed": seed, "response_format": "wav"}
    made = ask(server, "/v1/audio/voices/design", fields)
    candidates = made["candidates"]
    print(f"Text of the candidates: {made['text']}")
    for number, each in enumerate(candidates, start=1):
        file = output / f"design-{number}.wav"
        audio = base64.b64decode(each["audio"])
        try:
            file.write_bytes(audio)
        except OSError as error:
            raise StartError(f"{file} cannot be written: {error.strerror}") from None
        print(f"{number}  {each['id']}  {file}  {each['seconds']:.1f} s  seed {each['seed']}")
        if lock is None and _is_terminal():
            _play(audio)
    for each in made["left_out"]:
        print(f"-  left out, seed {each['seed']}: {each['reason']}")
    if lock is None and _is_terminal():
        lock = typer.prompt("Number of the voice to store, 0 for none", type=int, default=0) or None
    if lock is None:
        print("To store a candidate within an hour, run `talkray voice lock ID NAME`.")
        return
    if not 1 <= lock <= len(candidates):
        raise InvalidRequest(f"candidate {lock} does not exist. Use 1 to {len(candidates)}", "lock")
    print(_locked(server, candidates[lock - 1]["id"], name or typer.prompt("Name of the voice")))


@voices.command("lock")
def lock_design(
    design_id: Annotated[str, typer.Argument(metavar="ID", help="ID of a candidate from the last hour.")],
    name: Annotated[str, typer.Argument(help="Name of the stored voice.")],
    url: Server = None,
) -> None:
    """Store a candidate of `design` as a voice."""
    print(_locked(running_server(url), design_id, name))


def _locked(server: str, design_id: str, name: str) -> str:
    voice = ask(server, "/v1/audio/voices", {"design": design_id, "name": name})
    return f"{voice['id']}  {voice['name']}"


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _play(audio: bytes) -> None:
    try:
        play(lambda write: write(audio))
    except RefusedError as error:
        print(f"cannot play the candidate: {error}")
