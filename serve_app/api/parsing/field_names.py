"""From the names of a dialect's fields to those of a `SpeechBody`."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from deployments.errors import InvalidRequest

# A dialect's fields, fields of nested objects after a dot, and which field of a SpeechBody each becomes. None: it has
# another effect. "bit_rate" is no field of a SpeechBody, but treated as one.
Names = Mapping[str, str | None]


def flat(fields: Mapping[str, object], names: Names) -> dict[str, object]:
    """`fields` that were sent, with dotted names for fields of the nested objects that `names` knows. A null is an
    absent field, and so is an object of nothing else.
    """
    outer = {name[:end] for name in names for end, char in enumerate(name) if char == "."}
    return dict(_flat(fields, outer, ""))


def _flat(fields: Mapping[str, object], outer: set[str], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in fields.items():
        path = prefix + name.replace(".", "?")  # a dot of the client's own is no nesting
        if path in outer and isinstance(value, Mapping):
            yield from _flat(value, outer, f"{path}.")
        elif value is not None and not _is_all_null(value):
            yield path, value


def _is_all_null(value: object) -> bool:
    """Whether it is an object of nulls. An empty one is none: some clients switch a feature on with it."""
    return isinstance(value, Mapping) and bool(value) and all(entry is None for entry in value.values())


def renamed(sent: Mapping[str, object], names: Names) -> dict[str, object]:
    """The fields of a SpeechBody. Of two that mean the same the first in `names` counts."""
    return {ours: sent[theirs] for theirs, ours in reversed(list(names.items())) if ours is not None and theirs in sent}


def theirs(sent: Mapping[str, object], names: Names) -> dict[str, str]:
    """The client's own names of the fields of a SpeechBody that it sent under another name, without the objects around
    them.
    """
    other = {ours: name for name, ours in reversed(list(names.items())) if ours is not None and name in sent}
    return {ours: name.rpartition(".")[2] for ours, name in other.items() if ours not in sent}


@contextmanager
def in_their_words(names: Mapping[str, str]) -> Iterator[None]:
    """The block's errors about a field name the client's own one. `names`: as `theirs` returned them."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is None or (name := names.get(error.param)) is None:
            raise
        raise type(error)(re.sub(rf"^{re.escape(error.param)}\b", name, error.message), name, error.code) from None
