"""Sentences, numbers and names to speak in each language that released models support, and a file reader."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

OURS = Path(__file__).with_name("spoken_texts.yaml")
SENTENCES = "sentences"  # the only kind of text that has no difficult words


@dataclass(frozen=True, slots=True)
class Text:
    """Text as written, and its words as spoken."""

    kind: str
    number: int
    written: str
    spoken: str


def read_texts(language: str, file: Path = OURS) -> list[Text]:
    """Return all texts in a language. Raises `SystemExit` if the file has none."""
    known: dict[str, dict[str, list[Any]]] = yaml.safe_load(file.read_text(encoding="utf-8"))
    if language not in known:
        raise SystemExit(f"{file} has no texts in {language!r}. Use --texts, or one of: {', '.join(known)}")
    return list(_read(known[language]))


def _read(kinds: dict[str, list[Any]]) -> Iterator[Text]:
    for kind, items in kinds.items():
        for number, item in enumerate(items):
            written, spoken = (item["written"], item["spoken"]) if isinstance(item, dict) else (item, item)
            yield Text(kind, number, str(written), str(spoken))
