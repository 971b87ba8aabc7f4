"""The fields that a vendor or server documents, as `rows/` has them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sent:
    """A value that differs from the default; `beside` are fields without which it would mean nothing."""

    value: object
    beside: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where fields stand: in the query, or in an object of a message or a body."""

    fields: Json
    message: int | None = 0  # None: the query
    inside: str = ""


@dataclass(frozen=True, slots=True)
class Documented:
    """The fields that a vendor or server documents, each with a value that should have an effect."""

    path: str
    messages: Sequence[Json]  # the body over HTTP
    places: Sequence[Place]
    query: Json = field(default_factory=dict)
    protocols: Sequence[str] = ()
    over: Json = field(default_factory=dict)  # the message with which a socket has answered all; none over HTTP
    style: Sequence[str] = ()  # fields that describe a style
    language: str = ""


def fields(text: str) -> Json:
    """Fields as YAML writes them in a line."""
    read: Json = yaml.safe_load(f"{{{text}}}")
    return read


def messages(*texts: str) -> list[Json]:
    return [fields(text) for text in texts]
