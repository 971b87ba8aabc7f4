"""What is said to be heard, by language and kind."""

from pathlib import Path

from talkray_tools.spoken_texts import SENTENCES, Text, read_texts
from tools.demo_voice.texts import lines


def texts(language: str, file: Path | None = None) -> list[Text]:
    """All of a language: ours, or those of a file of the same form. Raises SystemExit where there are none.

    Ours in English: sentences that no training of the embedded voice held, and hard texts.
    """
    if file is not None or language != "english":
        return read_texts(language, file) if file else read_texts(language)
    sentences = [line.text for line in lines(0, ("any",)) if line.split == "heldout"]
    held_out = [Text(SENTENCES, number, text, text) for number, text in enumerate(sentences)]
    return held_out + read_texts(language, Path(__file__).with_name("texts.yaml"))
