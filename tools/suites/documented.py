"""Request fields that vendors and servers document, listed in `rows/`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sent:
    """Value that differs from the default. `beside` holds fields without which the value has no effect."""

    value: object
    beside: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Location of fields: the query, or an object in a message or body."""

    fields: Json
    message: int | None = 0  # index of the message; None: the query
    inside: str = ""


@dataclass(frozen=True, slots=True)
class Documented:
    """Fields that a vendor or server documents, each with a value that should have an effect."""

    path: str
    messages: Sequence[Json]  # the body for HTTP
    places: Sequence[Place]
    query: Json = field(default_factory=dict)
    protocols: Sequence[str] = ()
    ends_with: Json = field(default_factory=dict)  # last message of a socket's response; empty for HTTP
    style: Sequence[str] = ()  # fields that describe a style
    language: str = ""  # field that selects the language
    is_strict: bool = False  # whether an unsupported language is an error
    wrappers: Sequence[
        str
    ] = ()  # objects that contain all fields of a message: names in errors and `ignored` omit them


def fields(text: str) -> Json:
    """Parse fields from one line of YAML."""
    read: Json = yaml.safe_load(f"{{{text}}}")
    return read


def messages(*texts: str) -> list[Json]:
    return [fields(text) for text in texts]
