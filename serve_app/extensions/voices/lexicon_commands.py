"""`talkray lexicon`: how words are said, for every request of the servers that follow a store of voices."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.errors import InvalidRequest, StartError
from loadtest.command_app import CommandApp
from serve_app.extensions.voices.voice_commands import Store, read_file, with_voices

if TYPE_CHECKING:  # they import what decodes recordings
    from serve_app.extensions.voices.library import Voices
    from serve_app.extensions.voices.stored_voice import StoredLexicon

_NAME = "server"

lexicon = CommandApp("How words are said, for every request.")

Word = Annotated[str, typer.Argument(help="As it is written; in small letters it is meant in any case.")]


@lexicon.command("list")
def list_words(store: Store = None) -> None:
    """Print each word and how it is said."""
    for word, respelling in sorted(_words(store).items()):
        print(f"{word}\t{respelling}")


@lexicon.command()
def add(word: Word, respelling: Annotated[str, typer.Argument(help="Its respelling.")], store: Store = None) -> None:
    """Say a word as it is respelled. Running servers do so within seconds."""
    print(_line(_keep(store, {**_words(store), word: respelling})))


@lexicon.command()
def remove(word: Word, store: Store = None) -> None:
    """Say a word as it is written again."""
    words = _words(store)
    if words.pop(word, None) is None:
        raise InvalidRequest(f"{word!r} is not in the lexicon: `talkray lexicon list` shows it", "word")
    print(_line(_keep(store, words)))


@lexicon.command("import")
def import_words(
    file: Annotated[Path, typer.Argument(help="A W3C Pronunciation Lexicon (PLS) with aliases.")], store: Store = None
) -> None:
    """Add the aliases of a PLS file; its words replace those of the same spelling."""
    from serve_app.extensions.text.lexicon import from_pls

    print(_line(_keep(store, {**_words(store), **from_pls(read_file(file), str(file))})))


@lexicon.command()
def export(
    output: Annotated[Path, typer.Option("-o", "--output", help="The file.")] = Path("lexicon.pls"),
    language: Annotated[str, typer.Option(help="That the file names.")] = "en",
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
    from serve_app.extensions.voices.stored_voice import StoredLexicon, new_id, new_version, now

    async def work(stored: "Voices") -> StoredLexicon:
        known = await _found(stored) or StoredLexicon(
            id=new_id("lexicon"), name=_NAME, created_at=now(), version=new_version(), words={}, for_all=True
        )
        return await stored.keep(known.with_words(words), {})

    return with_voices(store, "", work)


def _line(kept: "StoredLexicon") -> str:
    return f"{len(kept.words)} words are said as they are respelled"
