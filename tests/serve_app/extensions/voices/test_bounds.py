"""Every record that is stored has bounds, and docs/security.md has each of them."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import serve_app.api.access
from serve_app.extensions import BUILT_IN

KEEPING = [f"serve_app.extensions.{name}" for name in ("voices", "jobs", "records") if name in BUILT_IN]
STORED = (*map(importlib.import_module, KEEPING), serve_app.api.access)
SECURITY = Path(__file__).parents[4] / "docs/security.md"
WHOLE = re.compile(r"\^[^*+]*\$")  # a pattern of limited length
SIZED = (str, bytes, list, tuple, dict, set, frozenset)


def records() -> list[type[Any]]:
    """Each pydantic model of these packages but their settings, and each dataclass within one."""
    found: dict[str, type[Any]] = {}
    for package in STORED:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith(".settings"):  # they come from the operator, not from a client
                continue
            for each in vars(importlib.import_module(module.name)).values():
                if isinstance(each, type) and issubclass(each, BaseModel) and each.__module__ == module.name:
                    found[each.__name__] = each
    waiting = list(found.values())
    while waiting:
        for _, hint in hints(waiting.pop()):
            for part in parts_of(hint):
                is_record = isinstance(part, type) and (is_dataclass(part) or issubclass(part, BaseModel))
                if is_record and part.__name__ not in found:
                    found[part.__name__] = part
                    waiting.append(part)
    return list(found.values())


def hints(record: type[Any]) -> Iterator[tuple[str, Any]]:
    names = record.model_fields if issubclass(record, BaseModel) else [each.name for each in fields(record)]
    known = get_type_hints(record, include_extras=True)
    return ((name, known[name]) for name in names)


def parts_of(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint) if get_origin(hint) is not Literal else ():
        yield from parts_of(part)


def bounds(hint: Any, *, limits: tuple[Any, ...] = ()) -> Iterator[int | None]:
    """The largest size of each text and collection in a type; None of one without any."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *more = get_args(hint)
        metadata = [limit for each in more for limit in (each.metadata if isinstance(each, FieldInfo) else [each])]
        yield from bounds(inner, limits=(*limits, *metadata))
    elif origin in (Union, UnionType):
        for part in get_args(hint):
            yield from bounds(part, limits=limits)
    elif origin is not Literal and (origin or hint) in SIZED:
        most = [limit.max_length for limit in limits if getattr(limit, "max_length", None) is not None]
        pattern = next((limit.pattern for limit in limits if getattr(limit, "pattern", None)), "")
        fixed = origin is tuple and Ellipsis not in get_args(hint)
        if not WHOLE.fullmatch(pattern) and not fixed:
            yield min(most, default=None)
        for part in get_args(hint):
            yield from bounds(part)


@pytest.mark.parametrize("record", records(), ids=lambda record: record.__name__)
def test_every_bound_of_a_record_is_documented(record: type[Any]) -> None:
    text = SECURITY.read_text()
    rows = [line for line in text.splitlines() if line.startswith(f"| `{record.__name__}`")]
    for name, hint in hints(record):
        for most in bounds(hint):
            assert most is not None, f"{record.__name__}.{name} has no bound: {hint}"
            [row] = rows
            entry = next((part for part in row.split("|")[2].split(";") if f"`{name}`" in part), "")
            assert re.search(rf"(?<![\d,]){most:,}(?!\d|,\d)", entry), f"{record.__name__}.{name}: no {most:,} in {row}"
