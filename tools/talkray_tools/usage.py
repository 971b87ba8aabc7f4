"""`talkray usage`: report usage from the counts that servers write to the voice store."""

import csv
import re
import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer

from deployments.errors import InvalidRequest
from serve_app.extensions.records.usage_counts import LABELS, Used, read_usage
from serve_app.extensions.voices.voice_commands import Store
from serve_app.extensions.voices.voice_store import VoiceStore, default_folder
from talkray_tools.arguments import run_program

_HOURS = {"h": 1, "d": 24, "w": 168}
_HOUR = re.compile(r"\d{4}-\d\d-\d\d(T\d\d)?")


def usage(
    since: Annotated[str, typer.Option(help="Start: 24h, 7d, 4w, or a time in UTC such as 2026-11-01T08.")] = "24h",
    by: Annotated[str, typer.Option(help="Columns to group by: key,model,voice,dialect.")] = "key",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    store: Store = None,
) -> None:
    """Report usage by whole hours in UTC. Servers write their counts every ten seconds."""
    labels = [name.strip() for name in by.split(",")]
    if unknown := [name for name in labels if name not in LABELS]:
        raise InvalidRequest(f"--by: {unknown[0]!r} is unknown. Use: {', '.join(LABELS)}", "by")
    summed: dict[tuple[str, ...], Used] = {}
    for hour in read_usage(VoiceStore(store or str(default_folder())), _first_hour(since, time.time())):
        for row in hour.rows:
            summed.setdefault(tuple(getattr(row, name) for name in labels), Used()).add(row)
    most_first = sorted(summed.items(), key=lambda each: (-each[1].characters, each[0]))
    rows: list[list[object]] = [[*labels, *Used.__slots__]]
    rows += [[*label, *_told(used)] for label, used in most_first]
    if as_csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
    else:
        _print_table(rows, num_labels=len(labels))


def _first_hour(since: str, now_s: float) -> str:
    """Return the first hour to include, in the format of `UsageHour.hour`. Raises `InvalidRequest`."""
    if (count := since[:-1]).isdecimal() and since[-1] in _HOURS:
        return time.strftime("%Y-%m-%dT%H", time.gmtime(max(0.0, now_s - 3600 * int(count) * _HOURS[since[-1]])))
    if _HOUR.fullmatch(since) is None:
        raise InvalidRequest(f"--since: {since!r} is invalid. Use 24h, 7d, 4w, 2026-11-01 or 2026-11-01T08", "since")
    return since


def _told(used: Used) -> list[object]:
    return [round(count, 1) if isinstance(count, float) else count for count in asdict(used).values()]


def _print_table(rows: list[list[object]], *, num_labels: int) -> None:
    cells = [["-" if cell == "" else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        padded[num_labels:] = [cell.strip().rjust(width) for cell, width in zip(row, widths, strict=True)][num_labels:]
        print("  ".join(padded))


if __name__ == "__main__":
    run_program(usage, "talkray usage")
