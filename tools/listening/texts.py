"""Texts for listening tests, by language and kind."""

from pathlib import Path

from talkray_tools.spoken_texts import SENTENCES, Text, read_texts
from tools.demo_voice.texts import lines


def texts(language: str, file: Path | None = None) -> list[Text]:
    """Return all texts of a language, from the project or from `file`. Raises `SystemExit` if there are none.

    English texts include sentences that were not used to train the embedded voice, and hard texts.
    """
    if file is not None or language != "english":
        return read_texts(language, file) if file else read_texts(language)
    sentences = [line.text for line in lines(0, ("any",)) if line.split == "heldout"]
    held_out = [Text(SENTENCES, number, text, text) for number, text in enumerate(sentences)]
    return held_out + read_texts(language, Path(__file__).with_name("texts.yaml"))
