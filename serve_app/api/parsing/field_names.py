"""Mapping of a dialect's field names to the fields of `SpeechBody`."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from deployments.errors import InvalidRequest

# Maps a dialect's fields to fields of SpeechBody. Names in nested objects are dotted. Fields with another effect map to
# None. The name "bit_rate" is not in SpeechBody, but is treated as a field of it.
Names = Mapping[str, str | None]


def flat(fields: Mapping[str, object], names: Names) -> dict[str, object]:
    """Flatten `fields`, with dotted names for the nested objects that `names` contains. Leave out nulls and objects
    that contain only nulls.
    """
    outer = {name[:end] for name in names for end, char in enumerate(name) if char == "."}
    return dict(_flat(fields, outer, ""))


def _flat(fields: Mapping[str, object], outer: set[str], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in fields.items():
        path = prefix + name.replace(".", "?")  # a dot in the client's own name does not mean nesting
        if path in outer and isinstance(value, Mapping):
            yield from _flat(value, outer, f"{path}.")
        elif value is not None and not _is_all_null(value):
            yield path, value


def _is_all_null(value: object) -> bool:
    """Return whether `value` is an object of nulls. An empty object does not count, because some clients use one to
    enable a feature.
    """
    return isinstance(value, Mapping) and bool(value) and all(entry is None for entry in value.values())


def renamed(sent: Mapping[str, object], names: Names) -> dict[str, object]:
    """Rename `sent` to fields of SpeechBody. If two fields have the same meaning, the first in `names` wins."""
    return {ours: sent[name] for name, ours in reversed(list(names.items())) if ours is not None and name in sent}


def client_names(sent: Mapping[str, object], names: Names) -> dict[str, str]:
    """Return the client's own names for SpeechBody fields that it sent under another name, without the enclosing
    objects.
    """
    other = {ours: name for name, ours in reversed(list(names.items())) if ours is not None and name in sent}
    return {ours: name.rpartition(".")[2] for ours, name in other.items() if ours not in sent}


@contextmanager
def with_client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Convert errors of this context with `in_client_names`."""
    try:
        yield
    except InvalidRequest as error:
        raise in_client_names(error, names) from None


def in_client_names(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return the error with the client's own name of its field. `names` is a result of `client_names`."""
    if error.param is None or (name := names.get(error.param)) is None:
        return error
    return type(error)(re.sub(rf"^{re.escape(error.param)}\b", name, error.message), name, error.code)
