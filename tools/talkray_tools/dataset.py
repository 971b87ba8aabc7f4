"""`talkray dataset`: synthesize the texts of a JSONL file with a running server, with word times and a manifest.

Each line gets its own seed, derived from the line's id and `--seed`. The order of lines does not affect their codes if
the server is deterministic: on a CPU, or on a GPU with `deterministic: true`.
"""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import soundfile
import typer
from rich.console import Console

from deployments.errors import InvalidRequest
from serve_app.cli.say import RefusedError, first_voice, running_server
from talkray_tools.arguments import run_program
from talkray_tools.job_client import PartFolder, PartList, fetch, made, write_whole
from talkray_tools.job_progress import JobLine, length, stopped

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_OWN = ("id", "custom_id", "text", "input")
_SEEDS = 1 << 63
_GOOD = ("stop", None)


def dataset(
    file: Annotated[Path, typer.Argument(help="JSONL with text, id, and fields of /v1/audio/speech.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the results.")],
    url: Annotated[str | None, typer.Option(help="Server URL. Default: the local server.")] = None,
    voice: Annotated[str | None, typer.Option(help="Default for lines that do not set it.")] = None,
    model: Annotated[str | None, typer.Option(help="Model, if the server has several.")] = None,
    language: Annotated[str | None, typer.Option(help="Default for lines that do not set it.")] = None,
    seed: Annotated[int, typer.Option(help="Seed. Another seed gives other speech for the same lines.", min=0)] = 0,
    audio_format: Annotated[Literal["flac", "wav", "mp3", "opus"], typer.Option("--format")] = "flac",
    shard_size: Annotated[
        int | None, typer.Option(help="Lines in a tar shard. Default: a folder of files.", min=1)
    ] = None,
) -> None:
    """Synthesize each line of a file. After Ctrl-C, run the same command again to resume."""
    console = Console(highlight=False, soft_wrap=True)
    lines = read_lines(file, seed)
    server = running_server(url)
    own_voice = voice or first_voice(server)
    defaults: dict[str, object] = {"voice": own_voice, "model": model, "language": language}
    defaults = {name: value for name, value in defaults.items() if value is not None}
    names = [str(line["custom_id"]) for line in lines]
    work = PartList(defaults, lines, names)
    manifest = output / "manifest.jsonl"
    if _is_complete(manifest, work):
        console.print(f"{output} already contains all lines of {file}", markup=False)
        return
    folder = PartFolder(made(output / "clips"), audio_format)
    with stopped(console, "run the same command again to resume"):
        with JobLine(console, "speaking") as progress:
            ignored = fetch(server, work, folder, progress.report)
        if ignored:
            console.print(f"the server ignored {ignored}", markup=False)
        entries = [_entry(work, number, folder) for number in range(len(lines))]
        if shard_size is not None:
            entries = _packed(output, folder, entries, shard_size)
    content = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    write_whole(manifest, content.encode())
    if shard_size is not None:
        for file in (file for name in names for file in folder.files(name)):
            file.unlink()  # the shard contains the clip
    total_s = sum(entry["duration_s"] for entry in entries)
    console.print(f"wrote {manifest} ({len(entries)} clips, {length(total_s)} of audio)", markup=False)
    bad = [entry["id"] for entry in entries if any(reason not in _GOOD for reason in entry["finish_reasons"])]
    if bad:
        listed = f"{', '.join(bad[:12])}{' ...' * (len(bad) > 12)}"
        console.print(f"{len(bad)} clips may be incomplete; see finish_reasons in the manifest: {listed}", markup=False)


def read_lines(file: Path, seed: int) -> list[dict[str, object]]:
    """Return a job's parts: `input`, `custom_id`, `seed` and each line's other fields. Raises `InvalidRequest`."""
    try:
        content = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}", "file") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file}: byte {error.start} is not UTF-8", "file") from None
    lines = [_line(text, f"{file}:{number}", number, seed) for number, text in _numbered(content)]
    seen: dict[object, int] = {}
    for number, line in enumerate(lines, start=1):
        if (before := seen.setdefault(str(line["custom_id"]).lower(), number)) != number:
            name = line["custom_id"]
            raise InvalidRequest(
                f"{file}: texts {before} and {number} have the same id {name!r} (case is ignored)", "id"
            )
    if not lines:
        raise InvalidRequest(f"{file} has no lines", "file")
    return lines


def _numbered(content: str) -> Iterator[tuple[int, str]]:
    yield from ((number, line) for number, line in enumerate(content.split("\n"), start=1) if line.strip())


def _line(text: str, place: str, number: int, seed: int) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{place}: invalid JSON: {error}", "file") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f'{place}: each line must be an object such as {{"text": "Hello."}}', "file")
    said = found.get("text", found.get("input"))
    if not isinstance(said, str) or not said.strip():
        raise InvalidRequest(f"{place}: text is required, as a string with words", "text")
    name = str(found.get("id", found.get("custom_id", f"{number:06}")))
    if not _ID.fullmatch(name):
        raise InvalidRequest(
            f"{place}: id {name[:40]!r} is not a valid file name. Use letters, digits, '.', '_' and '-'", "id"
        )
    own = {key: value for key, value in found.items() if key not in _OWN}
    return {"seed": _seed(seed, name), **own, "input": said, "custom_id": name}


def _seed(seed: int, name: str) -> int:
    """Return a line's seed, which does not depend on other lines."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]) % _SEEDS


def _is_complete(manifest: Path, work: PartList) -> bool:
    try:
        entries = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return False
    return [entry.get("digest") for entry in entries] == work.digests and all(
        (manifest.parent / entry["audio"].partition(":")[0]).exists() for entry in entries
    )


def _entry(work: PartList, number: int, folder: PartFolder) -> dict[str, Any]:
    """Return one manifest entry. Its paths are relative to the manifest."""
    name, asked = work.names[number], {**work.defaults, **work.parts[number]}
    told, info = folder.told(name), soundfile.info(folder.audio(name))
    return {
        "id": name,
        "text": asked["input"],
        "voice": asked.get("voice"),
        "seed": asked["seed"],
        "audio": f"clips/{folder.audio(name).name}",
        "words": f"clips/{name}.json",
        "word_times": "estimated" if told.get("estimated") else "exact",
        "duration_s": round(info.duration, 4),
        "sample_rate": info.samplerate,
        "sha256": hashlib.sha256(folder.audio(name).read_bytes()).hexdigest(),
        "finish_reasons": [segment.get("finish_reason") for segment in told.get("segments", ())],
        "digest": work.digests[number],
    }


def _packed(
    output: Path, folder: PartFolder, entries: Sequence[dict[str, Any]], shard_size: int
) -> list[dict[str, Any]]:
    """Pack the clips into shards and return their entries with shard paths. Equal clips yield identical shards."""
    packed = []
    for start in range(0, len(entries), shard_size):
        shard = f"shard-{start // shard_size:05}.tar"
        own = entries[start : start + shard_size]
        try:
            _write_shard(output / shard, [file for entry in own for file in folder.files(entry["id"])])
        except OSError as error:
            raise RefusedError(f"{output / shard} cannot be written: {error.strerror}") from None
        places = ({key: f"{shard}:{entry[key].partition('/')[2]}" for key in ("audio", "words")} for entry in own)
        packed += [{**entry, **place} for entry, place in zip(own, places, strict=True)]
    return packed


def _write_shard(shard: Path, files: Sequence[Path]) -> None:
    new = shard.with_name(f".{shard.name}.new")
    with tarfile.open(new, "w", format=tarfile.USTAR_FORMAT) as tar:
        for file in files:
            content, info = file.read_bytes(), tarfile.TarInfo(file.name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    new.replace(shard)


if __name__ == "__main__":
    run_program(dataset, "talkray dataset")
