"""`talkray book`: make an audiobook with a running server. Run the same command again to resume."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from deployments.errors import InvalidRequest
from serve_app.cli.say import first_voice, running_server
from serve_app.extensions.voices.reference_doctor import reading_time_s
from serve_app.extensions.voices.voice_commands import read_file
from talkray_tools.arguments import run_program
from talkray_tools.book.assembly import (
    Sound,
    Tags,
    book_format,
    chapter_starts,
    gains,
    picture_of,
    timeline,
    write_book,
)
from talkray_tools.book.captions import captions_of, srt, vtt
from talkray_tools.book.epub import EpubRules, epub_book
from talkray_tools.book.subtitles import dub, is_timed, subtitle_book
from talkray_tools.book.text import Book, Paragraph, markdown_book, plain_book, read_text
from talkray_tools.job_client import Fields, PartFolder, PartList, fetch, made, write_whole
from talkray_tools.job_progress import JobLine, length, stopped

_TURN_S, _HEADING_S, _BREAK_S, _CHAPTER_S = 0.3, 0.9, 1.2, 2.0  # seconds of silence, by kind of boundary
_MOST_LISTED = 12  # problems and omissions printed in the terminal; the report file lists all of them
_MARKDOWN = (".md", ".markdown")
_SUBTITLES = (".srt", ".vtt")
_OTHER_BOOKS = (".pdf", ".mobi", ".azw", ".azw3", ".fb2", ".docx", ".doc", ".odt", ".rtf", ".html", ".htm", ".xhtml")
_OTHER_SUBTITLES = (".ass", ".ssa", ".sub", ".sbv", ".ttml", ".dfxp", ".smi", ".stl", ".lrc")


@dataclass(frozen=True, slots=True)
class Speaking:
    """Settings that apply to all paragraphs."""

    voice: str | None
    voices: dict[str, str]  # keyed by speaker name
    fields: dict[str, object]
    pause_s: float


def book(
    file: Annotated[Path, typer.Argument(help="EPUB, Markdown (.md), subtitles (.srt, .vtt), or plain text.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="m4b, mp3, opus, flac or wav. Default: FILE.m4b.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Server URL. Default: the local server.")] = None,
    voice: Annotated[str | None, typer.Option(help="Voice, from /v1/audio/voices.")] = None,
    voice_of: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VOICE", help="Voice for lines that begin with [NAME]:. Repeatable."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model, if the server has several.")] = None,
    instructions: Annotated[str | None, typer.Option(help="Style instructions, if the model supports them.")] = None,
    speed: Annotated[float, typer.Option(help="Speaking rate.", min=0.25, max=4)] = 1.0,
    language: Annotated[
        str | None, typer.Option(help="Language name or code. detect detects it for each segment.")
    ] = None,
    lexicon: Annotated[Path | None, typer.Option(help='Lexicon: {"word": "respelling"}, or PLS.')] = None,
    seed: Annotated[int | None, typer.Option(help="Seed. Bad endings are then not generated again.")] = None,
    captions: Annotated[Literal["srt", "vtt"] | None, typer.Option(help="Write captions next to the audio.")] = None,
    timed: Annotated[
        bool, typer.Option("--timed", help="Place each subtitle cue at its time, without other pauses.")
    ] = False,
    loudness: Annotated[
        float | None, typer.Option(help="Loudness of each voice in LUFS, such as -18.", min=-40, max=-8)
    ] = None,
    pause: Annotated[float, typer.Option(help="Seconds of silence between paragraphs.", min=0, max=10)] = 0.5,
    depth: Annotated[int, typer.Option(help="Heading levels that begin a chapter.", min=1, max=6)] = 2,
    notes: Annotated[Literal["skip", "read"], typer.Option(help="Notes of an EPUB.")] = "skip",
    tables: Annotated[Literal["rows", "skip"], typer.Option(help="Tables of an EPUB.")] = "rows",
    title: Annotated[str | None, typer.Option(help="Title. Default: the file's title.")] = None,
    author: Annotated[str | None, typer.Option(help="Author. Default: the file's author.")] = None,
    cover: Annotated[Path | None, typer.Option(help="Cover, as JPEG or PNG. Default: the file's cover.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print chapters and omitted parts, without synthesis.")] = False,
) -> None:
    """Make an audiobook with a running server. After Ctrl-C, run the same command again to resume."""
    console = Console(highlight=False, soft_wrap=True)
    found = _read(file, EpubRules(depth, notes == "read", tables == "rows"), timed=timed)
    found.title, found.author = title or found.title, author or found.author
    _check_cover(found, None if cover is None else read_file(cover))
    target = output or file.with_suffix(".m4b")
    book_format(target)
    if captions is not None and target.with_suffix(f".{captions}").absolute() == file.absolute():
        raise InvalidRequest(f"--captions would overwrite {file}: name another file with -o", "captions")
    voices = _voices(voice_of or [], found, required=not show)
    _describe(console, found)
    if show:
        return
    server = running_server(url)
    fields = {
        "model": model,
        "instructions": instructions,
        "speed": None if speed == 1 else speed,
        "language": language or None,
        "lexicon": _lexicon(lexicon),
        "seed": seed,
        "markup": found.markup,
    }
    speaking = Speaking(voice or first_voice(server), voices, {k: v for k, v in fields.items() if v is not None}, pause)
    with stopped(console, "run the same command again to resume"):
        _make(console, server, found, speaking, target=target, captions=captions, loudness=loudness)


def _make(
    console: Console,
    server: str,
    found: Book,
    speaking: Speaking,
    *,
    target: Path,
    captions: str | None,
    loudness: float | None,
) -> None:
    work = _work(found, speaking)
    folder = PartFolder(made(target.with_suffix(".parts")))  # shared by all output formats
    with JobLine(console, "speaking") as line:
        ignored = fetch(server, work, folder, line.report)
    if ignored:
        console.print(f"the server ignored {ignored}", markup=False)
    sounds = _sounds(found, work, folder, speaking)
    unfit: list[Mapping[str, Any]] = []
    if found.is_timed:
        sounds, unfit = dub([paragraph for _, paragraph in found.spoken()], sounds)
    told = Tags(found.title, found.author, found.date, found.publisher, found.language, found.cover)
    titles = [chapter.title for chapter in found.chapters]
    factors = None if loudness is None else gains(sounds, loudness)
    with JobLine(console, "writing") as line:
        write_book(target, sounds, titles, tags=told, factors=factors, report=line.counted(len(sounds)))
    times = timeline(sounds)
    if captions is not None:
        lines = [
            caption
            for number, (name, sound) in enumerate(zip(work.names, sounds, strict=True))
            for caption in captions_of(folder.told(name), times.start_s(number), sound.speed)
        ]
        text = srt(lines) if captions == "srt" else vtt(lines)
        write_whole(target.with_suffix(f".{captions}"), text.encode())
    paragraphs = _paragraphs(found, work, folder, sounds)
    report: dict[str, Any] = {
        "length_s": round(times.length_s, 3),
        "chapters": [
            {"title": titles[number], "start_s": round(start_s, 3)}
            for number, start_s in chapter_starts(sounds, times).items()
        ],
        "problems": [{**each, **problem} for each in paragraphs for problem in folder.problems(each["part"])],
        "unfit_cues": unfit,
        "left_out": dict(found.left_out),
        "remarks": found.remarks,
        "paragraphs": paragraphs,
    }
    report_file = target.with_suffix(".report.json")
    write_whole(report_file, json.dumps(report, ensure_ascii=False, indent=1).encode())
    console.print(f"wrote {target} ({length(times.length_s)}, {len(report['chapters'])} chapters)", markup=False)
    _warn(console, report["problems"])
    for each in unfit:
        late = f", begins {each['late_s']:.1f} s late" if each["late_s"] else ""
        console.print(f"{each['cue']}: {each['over_s']:.1f} s too long at {each['speed']:g}x{late}", markup=False)
    console.print(f"report: {report_file}; parts are kept in {folder.folder} until you delete it", markup=False)


def _paragraphs(found: Book, work: PartList, folder: PartFolder, sounds: Sequence[Sound]) -> list[dict[str, Any]]:
    """Return each text's position in the book in seconds; `part` is the name of its audio file."""
    times = timeline(sounds)
    return [
        {
            "chapter": found.chapters[chapter].title,
            "text": paragraph.text,
            "start_s": round(times.start_s(number), 3),
            "end_s": round(times.start_s(number) + float(folder.told(name)["duration_s"]) / sounds[number].speed, 3),
            "part": name,
        }
        for number, ((chapter, paragraph), name) in enumerate(zip(found.spoken(), work.names, strict=True))
    ]


def _read(file: Path, rules: EpubRules, *, timed: bool) -> Book:
    suffix = file.suffix.lower()
    if suffix in (*_OTHER_BOOKS, *_OTHER_SUBTITLES):
        form = "EPUB" if suffix in _OTHER_BOOKS else "SubRip (.srt)"
        known = "EPUB, Markdown, SubRip, WebVTT or plain text"
        raise InvalidRequest(f"{file}: the format is not supported. Use {known}, or convert the file to {form}", "file")
    if suffix == ".epub":
        found = epub_book(file, rules)
    else:
        remarks: list[str] = []
        text = read_text(file, remarks)
        if suffix in _SUBTITLES or (suffix not in _MARKDOWN and is_timed(text)):
            found = subtitle_book(text, file.stem, timed=timed)
        elif suffix in _MARKDOWN:
            found = markdown_book(text, file.stem, rules.depth)
        else:
            found = plain_book(text, file.stem)
        found.remarks += remarks
    if timed and not found.is_timed:
        raise InvalidRequest(f"--timed needs subtitles (.srt, .vtt): {file} has no times", "timed")
    return found


def _check_cover(found: Book, given: bytes | None) -> None:
    """Validate the cover. Raises `InvalidRequest` if `given` is damaged; ignores a damaged cover in the file."""
    if given is not None:
        picture_of(given)
        found.cover = given
    elif found.cover is not None:
        try:
            picture_of(found.cover)
        except InvalidRequest as error:
            found.cover = None
            found.left_out[error.message] += 1


def _voices(given: Sequence[str], found: Book, *, required: bool) -> dict[str, str]:
    """Map each speaker to a voice. Raises `InvalidRequest` for speakers that have no voice and for unknown names."""
    pairs = [each.partition("=") for each in given]
    wrong = next((name + sign for name, sign, voice in pairs if not (name.strip() and voice.strip())), None)
    if wrong is not None:
        raise InvalidRequest(f"--voice-of {wrong!r}: write NAME=VOICE", "voice_of")
    voices = {name.strip(): voice.strip() for name, _, voice in pairs}
    speakers = found.speakers()
    if unknown := [name for name in voices if name not in speakers]:
        named = f"it has {', '.join(speakers)}" if speakers else "it has no lines that begin with [NAME]:"
        raise InvalidRequest(f"--voice-of {unknown[0]}: the book has no speaker with this name; {named}", "voice_of")
    if required and (silent := [name for name in speakers if name not in voices]):
        wanted = " ".join(f'--voice-of "{name}=VOICE"' for name in silent)
        raise InvalidRequest(f"the book has lines of {', '.join(silent)}: add {wanted}", "voice_of")
    return voices


def _lexicon(file: Path | None) -> dict[str, str] | None:
    if file is None:
        return None
    content = read_file(file)
    if content.lstrip().startswith(b"<"):
        from serve_app.extensions.text.lexicon import from_pls

        return from_pls(content, str(file))
    try:
        words = json.loads(content)
    except ValueError as error:
        raise InvalidRequest(f"{file} is neither PLS nor JSON: {error}", "lexicon") from None
    if not isinstance(words, dict) or not all(isinstance(said, str) for said in words.values()):
        raise InvalidRequest(f'{file} must be an object such as {{"word": "respelling"}}', "lexicon")
    return words


def _work(found: Book, speaking: Speaking) -> PartList:
    defaults: dict[str, object] = {**speaking.fields}
    if speaking.voice is not None:
        defaults["voice"] = speaking.voice
    return PartList(defaults, [_part(paragraph, speaking) for _, paragraph in found.spoken()])


def _part(paragraph: Paragraph, speaking: Speaking) -> Fields:
    own = {"voice": speaking.voices[paragraph.speaker]} if paragraph.speaker else {}
    return {"input": paragraph.text, **own}


def _sounds(found: Book, work: PartList, folder: PartFolder, speaking: Speaking) -> list[Sound]:
    names, sounds = iter(work.names), []
    before: Paragraph | None = None
    for number, chapter in enumerate(found.chapters):
        is_first = True
        for paragraph in chapter.paragraphs:
            if paragraph.kind != "break":
                pause_s = _CHAPTER_S if is_first and before else _pause_s(before, paragraph, speaking.pause_s)
                voice = speaking.voices.get(paragraph.speaker, speaking.voice or "")
                sounds.append(Sound(folder.audio(next(names)), voice, pause_s, number))
                is_first = False
            before = paragraph
    return sounds


def _pause_s(before: Paragraph | None, paragraph: Paragraph, usual_s: float) -> float:
    if before is None:
        return 0.0
    if before.kind == "break":
        return _BREAK_S
    if before.kind == "heading":
        return _HEADING_S
    return min(usual_s, _TURN_S) if before.speaker != paragraph.speaker else usual_s


def _describe(console: Console, found: Book) -> None:
    texts = [paragraph.text for _, paragraph in found.spoken()]
    num_chars = sum(map(len, texts))
    by = f" by {found.author}" if found.author else ""
    about = length(sum(map(reading_time_s, texts)))
    console.print(
        f"{found.title}{by}: {len(found.chapters)} chapters, {num_chars:,} characters, about {about}", markup=False
    )
    for number, chapter in enumerate(found.chapters, start=1):
        own = sum(len(paragraph.text) for paragraph in chapter.paragraphs)
        console.print(f"{number:4}  {chapter.title} ({own:,} characters)", markup=False)
    if speakers := found.speakers():
        console.print(f"speakers: {', '.join(speakers)}", markup=False)
    for remark in found.remarks:
        console.print(f"note: {remark}", markup=False)
    for reason, count in list(found.left_out.items())[:_MOST_LISTED]:
        console.print(f"left out: {reason}{f' ({count})' if count > 1 else ''}", markup=False)
    if len(found.left_out) > _MOST_LISTED:
        console.print(f"left out: {len(found.left_out) - _MOST_LISTED} more items", markup=False)


def _warn(console: Console, problems: Sequence[dict[str, Any]]) -> None:
    for each in problems[:_MOST_LISTED]:
        again = ", drawn again" if each.get("redrawn") else ""
        place = f"{length(each['start_s'])} ({each['chapter']})"
        console.print(f"listen at {place}: {each['finish_reason']}{again}: {str(each['text'])[:60]}", markup=False)
    if len(problems) > _MOST_LISTED:
        console.print(f"and {len(problems) - _MOST_LISTED} more", markup=False)


if __name__ == "__main__":
    run_program(book, "talkray book")
