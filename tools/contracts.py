"""Write the public interfaces on which users may rely to docs/contracts/: `python -m tools.contracts`.

`--check`, as in `make lint`, fails if a file differs from the code. An added line is a new promise. A removed or
changed line breaks a promise; docs/versions.md lists the required version number.
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import typer
from starlette.routing import compile_path

import deployments.errors
from deployments.config import Strict
from deployments.serving import metrics
from loadtest.command_app import CommandApp
from serve_app import extension
from serve_app.api.access.keys import KeyDocument
from serve_app.api.application import create_api
from serve_app.api.resolve.resolver import RequestHooks
from serve_app.api.routing import dialects_of
from serve_app.cli.main import cli
from serve_app.config import AdmissionSettings, ApiSettings, AppConfig, settings_kinds
from serve_app.extensions import COMMANDS, command_group, load_extensions
from serve_app.extensions.jobs.stored_job import JobPlan, JobState, StoredJob
from serve_app.extensions.voices.stored_voice import StoredConsent, StoredDesign, StoredLexicon, StoredVoice
from serve_app.speech.utterance_synthesizer import Synthesizer
from tools.suites.rows import DOCUMENTED

ROOT = Path(__file__).parents[1]
FOLDER = "docs/contracts"
STORED = (StoredVoice, StoredConsent, StoredDesign, StoredLexicon, StoredJob, JobPlan, JobState, KeyDocument)
# Commands in their own modules (serve_app/cli/main.py). `bench` is for developers.
MODULES = {
    "book": "talkray_tools.book.__main__:book",
    "dataset": "talkray_tools.dataset:dataset",
    "loadtest": "loadtest.__main__:app",
    "logs": "talkray_tools.logs:logs",
    "plan": "talkray_tools.plan.__main__:plan",
    "random-checkpoint": "talkray_tools.random_checkpoint:random_checkpoint",
    "usage": "talkray_tools.usage:usage",
    "verify": "talkray_tools.verify:verify",
}
IN_SSML = {f"x-{value}" for value in ("fast", "high", "loud", "low", "slow", "soft", "strong", "weak")}
FOR_EXTENSIONS = (
    extension.Extension, RequestHooks, extension.ExtensionState, extension.OpenContext, extension.Node,
    extension.DeploymentSpec, extension.Dialect, extension.Route, extension.JsonRoute, extension.Charge,
    extension.SocketKind, extension.Sample,
)  # fmt: skip


def http() -> Iterator[str]:
    """Yield each route with its query and body fields, followed by the error codes."""
    with TemporaryDirectory() as folder:  # replaces the user's store of voices
        settings = ApiSettings.model_validate({"voices": {"store": folder}})
        node = extension.Node(is_running=bool, is_ready=bool, scrape=bytes)
        fake = cast("Synthesizer", object())  # never called
        api = create_api({"": (fake, AdmissionSettings())}, settings, opened={}, node=node)
        schema = api.openapi()
    known = documented()
    of_core = [f"{method.upper()} {path}" for path, operations in schema["paths"].items() for method in operations]
    of_dialects = [route.operation for dialect in dialects() for route in dialect.routes]
    fields = {operation: set[str]() for operation in (*of_core, *of_dialects)}
    for operation, names in fields.items():
        method, path = operation.split()
        shown = schema["paths"].get(path, {}).get(method.lower(), {})  # empty for routes that /docs hides
        names |= {each["name"] for each in shown.get("parameters", []) if each["in"] == "query"}
        for content in shown.get("requestBody", {}).get("content", {}).values():
            names |= properties(content.get("schema", {}), schema)
        if method == "POST":
            names |= known_at(path, known)
    yield from listed(fields)
    yield from sorted({*errors(), *headers()})


def sockets() -> Iterator[str]:
    """Yield each WebSocket with its subprotocols, query fields and message fields."""
    known, fields = documented(), defaultdict[str, set[str]](set)
    for dialect in dialects():
        for path, kind in dialect.sockets:
            fields[f"WS {path}"] |= known_at(path, known) | ({f"({kind.subprotocol})"} if kind.subprotocol else set())
    return listed(fields)


def dialects() -> tuple[extension.Dialect, ...]:
    return dialects_of(load_extensions())


def documented() -> dict[str, set[str]]:
    """Return the tested fields of speech requests, by path."""
    fields = defaultdict[str, set[str]](set)
    for row in DOCUMENTED.values():
        found = {f"{place.inside}.{name}".lstrip(".") for place in row.places for name in place.fields}
        fields[row.path.partition("?")[0]] |= found | set(row.query)
    return fields


def known_at(template: str, known: Mapping[str, set[str]]) -> set[str]:
    """Return the known fields of all paths that match a route template."""
    pattern = compile_path(template)[0]
    return set[str]().union(*(names for path, names in known.items() if pattern.match(path)))


def properties(schema: Mapping[str, Any], root: Mapping[str, Any]) -> set[str]:
    """Return the field names of a body."""
    if "$ref" in schema:
        schema = root["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    alternatives = [inner for key in ("anyOf", "oneOf", "allOf") for inner in schema.get(key, [])]
    return {*schema.get("properties", {})}.union(*(properties(each, root) for each in alternatives))


def errors() -> Iterator[str]:
    """Yield status, type and code of each kind of error, and the codes of specific errors."""
    names = {name for name, value in vars(deployments.errors).items() if isinstance(value, type)}
    for node in code_nodes():
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", "")
            values = [getattr(each, "value", None) for each in node.args[:3]]
            if name == "ErrorKind" and len(values) == 3:
                yield "error {} {} {}".format(*values)
            elif name in names and len(values) == 3 and isinstance(values[2], str):
                yield f"error {name} {values[2]}"


def headers() -> Iterator[str]:
    """Yield the request and response headers that are specific to speech servers."""
    for node in code_nodes():
        name = str(node.value) if isinstance(node, ast.Constant) else ""
        if re.fullmatch(r"x-[a-z]+(-[a-z]+)*", name) and name not in IN_SSML:
            yield f"header {name}"


def code_nodes() -> Iterator[ast.AST]:
    for file in sorted((ROOT / "serve_app").rglob("*.py")):
        yield from ast.walk(ast.parse(file.read_text(encoding="utf-8")))


def settings() -> Iterator[str]:
    """Yield each setting with its default."""
    kinds: dict[str, type[Strict]] = {"": AppConfig}
    kinds |= {f"api.{name}.": kind for name, kind in settings_kinds(None).items()}
    return iter(sorted(line for prefix, kind in kinds.items() for line in model_lines(kind, prefix)))


def stores() -> Iterator[str]:
    """Yield the fields of stored records and of the key file, followed by file locations."""
    for kind in STORED:
        yield from sorted(model_lines(kind, f"{kind.__name__}.", typed=True))
    for module in ("serve_app.extensions.voices.voice_store", "serve_app.extensions.jobs.job_store"):
        yield from re.findall(r"^    (\w+/\S+\.?\w*)", str(sys.modules[module].__doc__), re.MULTILINE)


def model_lines(model: type[Any], prefix: str, *, typed: bool = False, values: Any = None) -> Iterator[str]:
    """Yield the fields of a pydantic model or dataclass and of nested models, with defaults. `values` is an object with
    other defaults.
    """
    for name, kind, default in model_fields(model):
        default = getattr(values, name, default)
        inner = [each for each in models_in(kind) if each is not model]
        for each in inner:
            values_of = default if isinstance(default, each) else None
            yield from model_lines(each, f"{prefix}{name}.", typed=typed, values=values_of)
        if not inner:
            shown = f": {type_name(kind)}" if typed else ""
            yield f"{prefix}{name}{shown}{'' if default is ... else f' = {plain(default)}'}"


def model_fields(model: type[Any]) -> Iterator[tuple[str, Any, object]]:
    """Yield name, type and default of each field; the default is `...` if there is none."""
    if dataclasses.is_dataclass(model):
        for each in dataclasses.fields(model):
            yield each.name, each.type, ... if each.default is dataclasses.MISSING else each.default
        return
    for name, field in model.model_fields.items():
        yield name, field.annotation, ... if field.is_required() else field.get_default(call_default_factory=True)


def models_in(kind: Any) -> list[type]:
    if isinstance(kind, type) and (hasattr(kind, "model_fields") or dataclasses.is_dataclass(kind)):
        return [kind]
    return [model for inner in getattr(kind, "__args__", ()) for model in models_in(inner)]


def command_line() -> Iterator[str]:
    """Yield each command with its arguments and options."""
    apps: dict[str, Any] = {"": cli}
    apps |= {name: command_group(name) for name in COMMANDS}
    apps |= {name: resolve_name(place) for name, place in MODULES.items()}
    for name, app in sorted(apps.items()):
        yield from commands(f"talkray {name}".strip(), as_click(app))


def as_click(app: Any) -> Any:
    if not isinstance(app, typer.Typer):
        command, app = app, CommandApp()
        app.command()(command)
    return typer.main.get_command(app)


def commands(name: str, command: Any) -> Iterator[str]:
    words = [
        " / ".join((*each.opts, *each.secondary_opts)) if each.param_type_name == "option" else each.name.upper()
        for each in command.params
    ]
    groups = getattr(command, "commands", {})
    if words or not groups:
        yield from wrapped(name, words)
    for inner in sorted(groups.values(), key=lambda each: str(each.name)):
        if inner.name not in ("bench", *COMMANDS, *MODULES):
            yield from commands(f"{name} {inner.name}", inner)


def instruments() -> Iterator[str]:
    """Yield each metric with its Prometheus name and labels."""
    for each in sorted(metrics.INSTRUMENTS, key=name_of):
        kind = "histogram" if each.boundaries else "counter" if each.name.endswith("_total") else "gauge"
        yield f"{each.name} {kind} {' '.join((metrics.MODEL, *each.tags))}"


def name_of(instrument: metrics.Instrument) -> str:
    return instrument.name


def extensions() -> Iterator[str]:
    """Yield the classes for extensions, with fields, methods and parameters."""
    for kind in FOR_EXTENSIONS:
        if issubclass(kind, Enum):
            yield from (f"{kind.__name__}.{name}" for name in cast("type[Enum]", kind).__members__)
        elif dataclasses.is_dataclass(kind):
            for each in dataclasses.fields(kind):
                default = "" if each.default is dataclasses.MISSING else f" = {plain(each.default)}"
                yield f"{kind.__name__}.{each.name}: {type_name(each.type)}{default}"
        for name, method in vars(kind).items():
            if inspect.isfunction(getattr(method, "__func__", method)) and not name.startswith("_"):
                signature = inspect.signature(getattr(method, "__func__", method))
                yield f"{kind.__name__}.{name}({', '.join(list(signature.parameters)[1:])})"


SURFACES: dict[str, Callable[[], Iterator[str]]] = {
    "http": http, "sockets": sockets, "settings": settings, "command-line": command_line, "metrics": instruments,
    "extension": extensions, "stores": stores,
}  # fmt: skip


def listed(fields: Mapping[str, set[str]]) -> Iterator[str]:
    for operation in sorted(fields, key=lambda each: each.split()[::-1]):
        yield from wrapped(operation, sorted(fields[operation]))


def wrapped(name: str, words: list[str]) -> Iterator[str]:
    """Yield a name followed by its wrapped words."""
    yield name
    yield from textwrap.wrap(
        "  ".join(words), 110, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    )


def type_name(kind: Any) -> str:
    """Return a type's name without modules and limits, which docs/limits.md lists."""
    if isinstance(kind, str):
        return kind
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return type_name(inner[0])
    if origin in (Union, UnionType):
        return " | ".join(map(type_name, inner))
    if origin is None or origin is Literal or isinstance(inner[0], list):
        return re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(kind)).replace("NoneType", "None")
    return f"{origin.__name__}[{', '.join('...' if each is ... else type_name(each) for each in inner)}]"


def plain(value: object) -> str:
    """Format a default without object addresses and local folders."""
    if isinstance(value, Enum):
        return str(value.value)
    if inspect.isfunction(value) or isinstance(value, type):
        return value.__name__.replace("<lambda>", "...")
    return str(value) if isinstance(value, str | int | float | None) else repr(value)


def stale(root: Path, *, write: bool) -> list[str]:
    """Return the differences between the code and the files in `root`. `write` updates the files first."""
    found = list[str]()
    for name, lines in SURFACES.items():
        file = root / FOLDER / f"{name}.txt"
        text = "".join(f"{line}\n" for line in lines())
        if write:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        there = file.read_text(encoding="utf-8") if file.exists() else ""
        found += difflib.unified_diff(
            there.splitlines(), text.splitlines(), str(file.relative_to(root)), "the code", n=0, lineterm=""
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.contracts", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    differences = stale(ROOT, write=not parser.parse_args().check)
    if differences:
        print(*differences, sep="\n")
        sys.exit("A public surface has changed: see docs/versions.md, and run `python -m tools.contracts`.")


if __name__ == "__main__":
    main()
