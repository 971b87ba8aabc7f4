"""Text as it arrives from clients, made safe to speak."""

import unicodedata


def clean(text: str) -> str:
    """NFC without control and format (zero-width) characters, runs of whitespace as one space, no space at the ends."""
    spoken = "".join(char for char in text if char.isspace() or unicodedata.category(char) not in ("Cc", "Cf"))
    return " ".join(unicodedata.normalize("NFC", spoken).split())
