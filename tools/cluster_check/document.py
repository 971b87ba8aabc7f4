"""Read YAML files, and check their values against the rules of `rules.yaml`."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from serve_app.app import LONGEST_STREAM_S
from serve_app.cli.ray_settings import CLUSTER
from serve_app.extensions.live.connection import IDLE_TIMEOUT_S

DRAIN_S = float(CLUSTER["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
# Names that rules may use instead of values.
_NAMED = {
    "DRAIN": DRAIN_S,  # maximum drain time of a node
    "IDLE": IDLE_TIMEOUT_S,  # idle timeout of a WebSocket
    "LONGEST_STREAM": LONGEST_STREAM_S,
    "RAY": version("ray"),
}
# Comparisons of rules.yaml, as in error messages.
_MUST = {"is": "be", "only": "contain only", "with": "match", "without": "not match"}
_MUST |= {"over": "be greater than", "under": "be less than"}
_HERE = Path(__file__).parent


class Unreadable(Exception):
    """Error for a file that is not YAML, repeats a key, or cannot be rendered."""


@cache
def documents(file: Path) -> list[Any]:
    """Return the documents of a file with merge keys and anchors resolved. Raises `Unreadable`."""
    try:
        nodes = list(yaml.compose_all(file.read_text(encoding="utf-8"), yaml.CSafeLoader))
        for node in nodes:
            _refuse_double_keys(node)
        return [yaml.SafeLoader("").construct_document(node) for node in nodes]
    except (yaml.YAMLError, OSError) as error:
        raise Unreadable(f"{file}: invalid YAML: {' '.join(str(error).split())}") from None


def document(file: Path) -> Any:
    """Return the first document of a file. Raises `Unreadable`."""
    return documents(file)[0]


def _refuse_double_keys(node: yaml.Node) -> None:
    """Reject repeated keys. YAML's parser would silently use the last value."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = {"<<"}
        for key, value in node.value:
            if key.value in seen and key.value != "<<":
                raise yaml.MarkedYAMLError(problem=f"{key.value} occurs twice", problem_mark=key.start_mark)
            seen.add(key.value)
            _refuse_double_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_double_keys(value)


def at(data: Any, *where: str | int) -> Any:
    """Return the value at a path, or None if the path does not exist."""
    for part in where:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def against(name: str, data: Any, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors of a value according to a JSON schema."""
    for error in jsonschema.Draft202012Validator(schema).iter_errors(data):
        yield f"{name}: {error.json_path.removeprefix('$.')}: {error.message}"


def rules(subject: str, name: str, data: Any) -> Iterator[str]:
    """Yield the violations of a subject's rules, prefixed with `name`."""
    for place, how, wanted, *reason in document(_HERE / "rules.yaml")[subject]:
        named = _NAMED.get(wanted, wanted) if isinstance(wanted, str) else wanted
        for where, value in _places(data, place.removesuffix("~").split(" ")):
            if value is None and place.endswith("~"):
                continue
            if not _holds(value, how, named):
                yield f"{name}: {where}: {value!r} must {_MUST[how]} {named}{''.join(f': {each}' for each in reason)}"


def _places(data: Any, parts: list[str], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all places and values that a path matches, with `*` for every item and None for missing values."""
    if not parts:
        yield where.removeprefix("."), data
        return
    first, *rest = parts
    if first == "*":
        pairs = data.items() if isinstance(data, dict) else enumerate(data or ())
        for key, inner in pairs:
            yield from _places(inner, rest, f"{where}.{key}")
    else:
        yield from _places(at(data, int(first) if first.isdigit() else first), rest, f"{where}.{first}")


def _holds(value: Any, how: str, wanted: Any) -> bool:
    text = " ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
    number = re.search(r"\d+(\.\d+)?", text.rpartition("--stop-timeout")[2])
    match how:
        case "is":
            return bool(value == wanted and type(value) is type(wanted))
        case "only":
            return set(value) <= set(wanted)
        case "with" | "without":
            return (how == "with") is bool(re.search(wanted, text))
        case "over":
            return number is not None and float(number[0]) > wanted
        case "under":
            return number is not None and float(number[0]) < wanted
        case _:
            raise ValueError(f"rules.yaml: comparison {how!r} is unknown")


@cache
def schema(kind: str) -> dict[str, Any] | None:
    """Return the JSON schema of a manifest's `spec` from kinds.yaml, or None for an unknown kind."""
    kinds = document(_HERE / "kinds.yaml")
    return _expanded(kinds[kind]) if kind in kinds else None


def _expanded(compact: Any) -> dict[str, Any]:
    if isinstance(compact, str):
        leaves: dict[str, dict[str, Any]] = document(_HERE / "kinds.yaml")["leaves"]
        return leaves.get(compact) or ({} if compact == "any" else {"enum": compact.split("|")})
    properties, required = {}, []
    for key, inner in compact.items():
        name = key.removesuffix("[]").removesuffix("!")
        value = _expanded(inner)
        properties[name] = {"type": "array", "items": value} if key.endswith("[]") else value
        if key.removesuffix("[]").endswith("!"):
            required.append(name)
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required}
