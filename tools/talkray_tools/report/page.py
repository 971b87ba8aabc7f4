"""Render the report as JSON and as an HTML page, optionally compared to another report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment

from deployments.errors import InvalidRequest
from talkray_tools.report.frame import PartResult, ReportFolder

_AUDIO = (".wav", ".flac")
_MOST_AUDIO = 12  # audio players per part


def write(results: Sequence[PartResult], about: Mapping[str, Any], folder: ReportFolder, other: Path | None) -> None:
    """Write report.json and report.html. Raises OSError, and InvalidRequest if `other` is not a report."""
    record = folder.clean(dict(about) | {"parts": [asdict(each) for each in results]})
    folder.write_json(Path("report.json"), record)
    before = folder.clean(read(other)) if other else None
    folders = {"correctness": "verify", "numerics": "speed"}
    audio = {each.name: _audio(folder.path, folders.get(each.name, each.name)) for each in results}
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    rows = compared(before, record) if before else []
    page = environment.from_string(template).render(**record, rows=rows, before=before, audio=audio)
    (folder.path / "report.html").write_text(page + "\n", encoding="utf-8")


def _audio(folder: Path, raw: str) -> list[str]:
    files = sorted(each for each in (folder / raw).glob("*") if each.suffix in _AUDIO)
    return [str(each.relative_to(folder)) for each in files[:_MOST_AUDIO]]


def read(file: Path) -> dict[str, Any]:
    """Read a report.json. Raises InvalidRequest."""
    try:
        record = dict(json.loads(file.read_text(encoding="utf-8")))
        _figures(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"--compare {file}: the file is not a report of `talkray report`: {error!r}") from None
    return record


def compared(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return rows with the part, figure, old value, new value and change."""
    old, new = _figures(before), _figures(now)
    return [(*key, *_change(old.get(key), new.get(key))) for key in dict.fromkeys([*old, *new])]


def _figures(record: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for part in record["parts"]:
        found[part["name"], "verdict"] = part["verdict"]
        for check in part["checks"]:
            found |= {(part["name"], f"{check['name']}: {name}"): value for name, value in check["values"].items()}
    return found


def _change(first: Any, second: Any) -> tuple[str, str, str]:
    shown = [
        "-" if each is None else f"{each:.4g}" if isinstance(each, float) else str(each) for each in (first, second)
    ]
    if isinstance(first, int | float) and isinstance(second, int | float) and first:
        return shown[0], shown[1], f"{(second - first) / abs(first):+.1%}"
    return shown[0], shown[1], "" if first == second else "differs"
