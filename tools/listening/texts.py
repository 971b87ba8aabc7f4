"""What is said to be heard, by language and kind."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.demo_voice.texts import lines

SENTENCES = "sentences"  # the kind that is no hard one


@dataclass(frozen=True, slots=True)
class Text:
    """Something to say, as it is written, and the words that a reader makes of it."""

    kind: str
    number: int
    written: str
    spoken: str


def texts(language: str, file: Path | None = None) -> list[Text]:
    """All of a language: ours, or those of a file of the same form. Raises SystemExit where there are none."""
    source = file or Path(__file__).with_name("texts.yaml")
    known: dict[str, dict[str, list[Any]]] = yaml.safe_load(source.read_text(encoding="utf-8"))
    if language not in known:
        raise SystemExit(f"{source} has no texts in {language!r}, only in: {', '.join(known)}. See --texts")
    return [*(_held_out() if file is None and language == "english" else ()), *_read(known[language])]


def _held_out() -> Iterator[Text]:
    """Sentences that no training of the embedded voice held."""
    sentences = [line.text for line in lines(0, ("any",)) if line.split == "heldout"]
    return (Text(SENTENCES, number, text, text) for number, text in enumerate(sentences))


def _read(kinds: dict[str, list[Any]]) -> Iterator[Text]:
    for kind, items in kinds.items():
        for number, item in enumerate(items):
            written, spoken = (item["written"], item["spoken"]) if isinstance(item, dict) else (item, item)
            yield Text(kind, number, str(written), str(spoken))
