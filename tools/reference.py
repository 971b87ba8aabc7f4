"""Write the generated parts of docs/: `python -m tools.reference`. With `--check`, only compare them.

A generated part is the text between two comments of a page (`house.GENERATED`). Sources are the settings models with
the comments of their fields, the `--help` of each command, the metrics, the error table, and what extensions declare.
"""

import argparse
import ast
import inspect
import io
import os
import re
import runpy
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest.mock import patch

from pydantic.fields import FieldInfo

from deployments.config import Strict
from deployments.errors import InvalidRequest
from deployments.serving import metrics
from serve_app.api.error_replies import INTERNAL, KINDS, ErrorKind, ExtensionError
from serve_app.api.routing import dialects_of
from serve_app.cli.main import cli
from serve_app.config import AppConfig, settings_kinds
from serve_app.extensions import load_extensions
from tools.house import GENERATED, last_name, trees

Row = tuple[str, ...]

ROOT = Path(__file__).parents[1]
_UNITS = {
    "seconds": "_s", "bytes": "_bytes", "characters": "_chars", "requests per minute": "_per_minute",
    "streams": "streams|streams_per_replica", "replicas": "replicas", "requests": "_requests", "CPUs": "num_cpus",
    "GPUs": "num_gpus", "sequences": "num_seqs|num_waiting", "positions": "_len", "share": "fraction|use|share",
    "threads": "threads", "workers": "workers", "voices": "voices", "jobs": "jobs", "proxies": "proxies",
}  # fmt: skip


def table(*heads: str, rows: Iterable[Row]) -> str:
    lines = [heads, ("---",) * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def settings() -> Iterator[str]:
    """Yield a section for each settings model, with all dotted names under which it occurs."""
    places: defaultdict[type[Strict], list[str]] = defaultdict(list)
    find_places(AppConfig, "", places)
    for name, kind in settings_kinds(None).items():
        find_places(kind, f"api.{name}", places)
    titles = {kind: ", ".join(f"`{name}`" for name in names if name) for kind, names in places.items()}
    for kind, title in titles.items():
        described = effects(kind)
        rows = (setting(name, field, described[name], titles) for name, field in kind.model_fields.items())
        listed = table("setting", "values", "unit", "default", "effect", rows=rows)
        yield f"## {title or 'Application'}\n\n{about(kind)}\n\n{listed}"


def find_places(kind: type[Strict], place: str, places: dict[type[Strict], list[str]]) -> None:
    places[kind].append(place)
    for name, field in kind.model_fields.items():
        inner = nested(field.annotation)
        if inner is not None and not place.startswith("models"):  # models have the same settings as the application
            find_places(inner, f"{place}.{name}".lstrip("."), places)


def about(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def nested(annotation: object) -> type[Strict] | None:
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return annotation
    return next(filter(None, map(nested, get_args(annotation))), None)


def effects(kind: type[Strict]) -> dict[str, str]:
    """Return the comment next to or above each field, or else the docstring of the field's model."""
    found, comments = dict[str, str](), list[str]()
    for base in (base for base in reversed(kind.__mro__) if issubclass(base, Strict)):
        for line in inspect.getsource(base).splitlines():
            if field := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
                found[field[1]] = " ".join((*comments, field[2] or "")).strip()
            comment = re.match(r"    # (.*)", line)
            comments = [*comments, comment[1]] if comment else []
    for name, info in kind.model_fields.items():
        found[name] = found[name] or about(nested(info.annotation) or object)
        if found[name] == about(object):
            raise SystemExit(f"{kind.__name__}.{name}: add a comment that describes the setting")
    return found


def setting(name: str, field: FieldInfo, effect: str, titles: dict[type[Strict], str]) -> Row:
    inner = nested(field.annotation)
    anchor = re.sub(r"[^\w\- ]", "", titles[inner].lower()).replace(" ", "-") if inner else ""
    kind = f"[settings](#{anchor})" if inner else values(field.annotation, field.metadata)
    is_number = re.match("integer|number", kind)
    units = [unit for unit, names in _UNITS.items() if re.search(f"({names})$", name)] if is_number else [""]
    if not units:
        raise SystemExit(f"{name}: add its unit to _UNITS")
    return f"`{name}`", kind, units[0], default_of(field), f"{effect[0].upper()}{effect[1:].rstrip('.')}."


def values(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """Return the valid values of a setting."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values(inner[0], [bound for each in inner[1:] for bound in getattr(each, "metadata", ())])
    if origin in (Union, types.UnionType):
        return values(next(each for each in inner if each is not types.NoneType), metadata)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in inner)
    bounds = [f"{sign} {getattr(each, name)}" for each in metadata for sign, name in _BOUNDS if hasattr(each, name)]
    return ", ".join([_KINDS[origin or annotation], *bounds])


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    match default := field.get_default(call_default_factory=True):
        case None:
            return "unset"
        case Strict():
            return ", ".join(f"`{name}: {getattr(default, name)}`" for name in sorted(default.model_fields_set))
        case tuple():
            return f"`[{', '.join(default)}]`"
        case _:
            return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def commands() -> Iterator[str]:
    """Yield a section for each command with its `--help`, and a section for common options."""
    waiting, found = [Row()], list[tuple[str, list[Row]]]()
    while waiting:
        path = waiting.pop(0)
        head, _, panels = help_of(path).partition("╭")
        rows, inner = list[Row](), list[Row]()
        for title, panel in re.findall(r"─ (\w+) ─.*?╮\n(.*?)╰", panels, re.DOTALL):
            cells = [re.split(r"\s{2,}", line.strip("│ *")) for line in panel.splitlines()]
            if title in ("Arguments", "Options"):
                rows += [option(row) for row in cells if not row[0].startswith("--help")]
            else:
                inner += [(*path, row[0]) for row in cells]
        waiting = inner + waiting
        usage, _, text = head.strip().removeprefix("Usage: ").partition("\n")
        if not inner:
            found.append((f"## talkray {' '.join(path)}\n\n{' '.join(text.split())}\n\n`{usage.strip()}`", rows))
    heads, uses = ("option", "value", "effect"), Counter(row for _, rows in found for row in rows)
    common = [row for row, count in uses.items() if count >= _COMMON]
    for section, rows in found:
        yield section
        if own := [row for row in rows if row not in common]:
            yield table(*heads, rows=own)
        if shared := ", ".join(row[0] for row in rows if row in common):
            yield f"[Common options](#common-options): {shared}."
    yield f"## Common options\n\n{table(*heads, rows=common)}"


def help_of(path: Sequence[str]) -> str:
    """Return the wide output of `talkray ... --help`. Modules run in this process for speed."""

    def run_module(command: list[str], **_: object) -> int:
        with patch("sys.argv", command[2:]), suppress(SystemExit):
            runpy.run_module(command[2], run_name="__main__")
        return 0

    wide = patch.dict(os.environ, COLUMNS="1000")
    with redirect_stdout(io.StringIO()) as printed, wide, patch("subprocess.call", run_module), suppress(SystemExit):
        cli([*path, "--help"], prog_name="talkray")
    return re.sub(r"\x1b\[[\d;]*m", "", printed.getvalue())  # remove colours, which the environment may enable


def option(cells: list[str]) -> Row:
    """Parse a line of a help text into names, a value (except for switches), and the effect."""
    num_names = sum(cell.startswith("-") for cell in cells) or 1
    names, rest = [f"`{name}`" for each in cells[:num_names] for name in each.split(",")], cells[num_names:]
    has_value = len(rest) > 1 or rest[0][0] in "<[" or rest[0].isupper()
    return " ".join(names).replace("` `", "`, `"), f"`{rest.pop(0)}`" if has_value else "", " ".join(rest)


def instruments() -> Iterator[str]:
    rows = list[Row]()
    for each in metrics.INSTRUMENTS:
        kind = "histogram" if each.boundaries else "counter" if each.name.endswith("_total") else "gauge"
        rows.append((f"`{each.name}`", kind, ", ".join(f"`{tag}`" for tag in each.tags), each.description))
    yield table("metric", "type", "labels", "meaning", rows=rows)


def errors() -> Iterator[str]:
    """Yield the kinds of errors, and the specific codes that replace a kind's code."""
    load_extensions()
    added = {kind: kind.kind for kind in ExtensionError.__subclasses__()}
    kinds: dict[type, ErrorKind] = {**KINDS, **added, Exception: INTERNAL}
    special: defaultdict[int, set[str]] = defaultdict(set)
    status = {kind.__name__: reply.status for kind, reply in kinds.items() if issubclass(kind, InvalidRequest)}
    for tree in trees(ROOT, "serve_app", "deployments").values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (name := last_name(node.func)) in status:
                given = [*node.args[2:3], *(each.value for each in node.keywords if each.arg == "code")]
                special[status[name]].update(str(each.value) for each in given if isinstance(each, ast.Constant))
    rows = list[Row]()
    for kind, each in sorted(kinds.items(), key=lambda pair: (pair[1].status, pair[1].code)):
        meaning = (each.message or about(kind)).partition(". ")[0].removesuffix(".")
        rows.append((str(each.status), f"`{each.code}`", f"`{each.type}`", f"{meaning}.", "yes" if each.retry else ""))
    yield table("status", "`code`", "`type`", "meaning", "`Retry-After`", rows=rows)
    yield "Some requests get a more specific code:"
    codes = ((str(each), ", ".join(f"`{name}`" for name in sorted(names))) for each, names in sorted(special.items()))
    yield table("status", "`code`", rows=(row for row in codes if row[1]))


def extensions() -> Iterator[str]:
    rows = list[Row]()
    for each in load_extensions():
        package, page = f"serve_app.extensions.{each.name}", each.name.replace("_", "-") + ".md"
        named = f"[`{each.name}`]({page})" if (ROOT / "docs" / page).exists() else f"`{each.name}`"
        adds = (import_module(package).__doc__ or "").rstrip(".\n")
        rows.append((named, adds, ", ".join(f"`{name}`" for name in each.requires)))
    yield table("name", "adds", "requires", rows=[*rows, ("`default`", "all of the above", "")])


def keys() -> Iterator[str]:
    """Yield where each dialect accepts keys, in addition to `Authorization`."""
    rows = list[Row]()
    for each in dialects_of(load_extensions()):
        headers = ", ".join(f"`{name}: KEY`" for name in each.key_headers)
        parameters = ", ".join(f"`?{name}=KEY`" for name in each.key_parameters)
        if headers or parameters or each.key_protocols:
            rows.append((each.name, headers, parameters, ", ".join(f"`{prefix}KEY`" for prefix in each.key_protocols)))
    yield table("clients", "header", "WebSocket's query", "subprotocol", rows=rows)


_BOUNDS = (("≥", "ge"), (">", "gt"), ("≤", "le"), ("<", "lt"))
_KINDS = {
    bool: "`true`, `false`", int: "integer", float: "number", str: "text", Path: "path", tuple: "list", dict: "mapping",
}  # fmt: skip
_COMMON = 5  # an option of more commands than this is described once
PARTS = {
    "settings": settings, "commands": commands, "metrics": instruments, "errors": errors, "extensions": extensions,
    "keys": keys,
}  # fmt: skip


def written(page: str) -> str:
    """Return the page with current generated parts."""
    return GENERATED.sub(lambda found: "\n\n".join((found[1].rstrip(), *PARTS[found[2]](), found[4])), page)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    check = parser.parse_args().check
    pages = {page: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    stale = {page: new for page, text in pages.items() if (new := written(text)) != text}
    for page, new in stale.items():
        print(f"docs/{page.name}", "differs: run `python -m tools.reference`" if check else "written")
        if not check:
            page.write_text(new, encoding="utf-8")
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
