"""YAML files whose values know their lines, and the faults that are found at them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Where = tuple[str | int, ...]  # keys and indices from the root of a document to a value


@dataclass(frozen=True, order=True, slots=True)
class Fault:
    """What is wrong, and where."""

    file: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


class Unreadable(Exception):
    """A file that is no YAML, with the fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class Document:
    """One document of a YAML file. `data` has merge keys and anchors resolved."""

    def __init__(self, file: Path, root: yaml.Node) -> None:
        self.file = file
        _refuse_double_keys(file, root)
        # Merging also brings the nodes of what is merged, with their own lines, into each mapping.
        self.data: Any = yaml.SafeLoader("").construct_document(root)
        self._root = root

    def line(self, where: Where) -> int:
        """Of the value there, or of the deepest one above it that exists."""
        node, line = self._root, self._root.start_mark.line
        for part in where:
            if isinstance(node, yaml.MappingNode):
                found = [(key, value) for key, value in node.value if key.value == str(part)]
                if not found:
                    break
                key, node = found[-1]
                line = key.start_mark.line
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line
            else:
                break
        return int(line) + 1

    def fault(self, where: Where, message: str) -> Fault:
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).removeprefix(".")
        return Fault(self.file, self.line(where), f"{name}: {message}" if name else message)

    def against(self, schema: Mapping[str, Any], where: Where = ()) -> Iterator[Fault]:
        """Faults of the value there by a JSON schema."""
        value = at(self.data, where)
        for error in jsonschema.Draft202012Validator(schema).iter_errors(value):
            for inner, message in explained(error):
                yield self.fault((*where, *inner), message)


def explained(error: jsonschema.ValidationError) -> Iterator[tuple[Where, str]]:
    """Where a schema was broken, below the value that it was for, and how."""
    where: Where = tuple(error.absolute_path)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        properties = error.schema.get("properties", {}) if isinstance(error.schema, dict) else {}
        for key in error.instance.keys() - properties.keys():
            yield (*where, key), f"unknown key; known: {', '.join(sorted(properties))}"
    else:
        yield where, error.message


def at(data: Any, where: Where, default: Any = None) -> Any:
    """The value there; the default where nothing is."""
    for part in where:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return default
    return data


@cache
def documents(file: Path) -> Sequence[Document]:
    """Those of a file. Raises Unreadable."""
    try:
        text = file.read_text(encoding="utf-8")
        return [Document(file, node) for node in yaml.compose_all(text, yaml.SafeLoader)]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise Unreadable(Fault(file, line, f"no YAML: {getattr(error, 'problem', error)}")) from None
    except OSError as error:
        raise Unreadable(Fault(file, 1, f"cannot be read: {error.strerror}")) from None


def document(file: Path) -> Document:
    """The only one of a file. Raises Unreadable."""
    found = documents(file)
    if len(found) != 1:
        raise Unreadable(Fault(file, 1, f"has {len(found)} documents, not one"))
    return found[0]


def text_fault(file: Path, text: str, message: str) -> Fault:
    """One at the first line that has `text`."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return Fault(file, next((number for number, line in enumerate(lines, 1) if text in line), 1), message)


def _refuse_double_keys(file: Path, node: yaml.Node) -> None:
    """YAML's parser takes the last of two equal keys in silence."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen and key.value != "<<":
                raise Unreadable(Fault(file, key.start_mark.line + 1, f"{key.value} stands here twice"))
            seen.add(key.value)
            _refuse_double_keys(file, value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_double_keys(file, value)
