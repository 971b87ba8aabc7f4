"""Texts for the voices: usage examples and definitions of a dictionary, templates of everyday speech, and mixtures.

Every text is in its spoken form: letters, apostrophes and plain punctuation, numbers as words.
"""

import gzip
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deployments.embedded_voice.numbers import cardinal, ordinal
from tools.demo_voice.manners import MANNERS, PLAIN

NUM_HELD_OUT = 100
MANNER_SHARE = 0.3  # share of the training lines that are not spoken plainly
MAX_CHARACTERS = 300

_DATA = Path(__file__).parent / "data"
_SENTENCES, _DEFINITIONS = _DATA / "sentences.txt.gz", _DATA / "definitions.txt.gz"
_ALLOWED = re.compile(r"[A-Za-z][A-Za-z' ,.?!;:-]*[.?!]")
_CHARACTERS_PER_SECOND = 17.3
_PAUSES_S = 0.3
_HELD_OUT_LENGTHS = range(25, 110)


def _words(text: str) -> list[str]:
    return text.split()


_SLOTS = {
    "name": _words(
        "Anna Ben Carla David Emma Frank Grace Henry Isabel Jack Karen Leo Maria Nathan Olivia Paul Rachel Sam Tina "
        "Victor Wendy Michael Sarah Thomas Julia Robert Alice Peter Laura Daniel Nora Felix Iris Hugo Otto Miles Lily "
        "Edith"
    ),
    "surname": _words(
        "Miller Johnson Carter Brown Davis Wilson Taylor Anderson Thompson White Harris Clark Lewis Walker Young King "
        "Wright Scott Green Baker Adams Nelson Mitchell Roberts Turner Phillips Campbell Parker Evans Edwards"
    ),
    "day": _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "month": _words("January February March April May June July August September October November December"),
    "ordinal": [ordinal(day) for day in range(1, 32)],
    "city": _words(
        "London Paris Berlin Chicago Boston Seattle Denver Dallas Toronto Sydney Madrid Rome Vienna Tokyo Dublin Oslo "
        "Amsterdam Lisbon Prague Montreal Houston Phoenix Atlanta Portland"
    ),
    "thing": _words(
        "order account invoice appointment reservation package ticket flight password subscription delivery refund "
        "payment meeting message report contract printer phone computer car bicycle window garden kitchen"
    ),
    "adjective": _words(
        "new old small large early late quick quiet warm cold bright simple friendly careful useful beautiful strange "
        "wonderful difficult important"
    ),
    "place": _words(
        "office station airport library hospital market museum restaurant hotel school park bank bakery theater harbor"
    ),
    "weather": _words("sunny cloudy rainy windy foggy stormy clear freezing mild humid"),
    "unit": _words("minutes hours days weeks months miles dollars pounds degrees percent people pages"),
    "letter": [f"{first} {second}" for first in _words("A B C D E F") for second in _words("G K M P R T X Z")],
}
_TEMPLATES = (
    "Hello, this is {name}. How can I help you today?",
    "Good morning, {name}.",
    "Good afternoon, and thank you for calling.",
    "Thank you for calling. My name is {name}, how may I help you?",
    "Hi {name}, how are you?",
    "Yes, of course.",
    "No problem at all.",
    "I'm sorry, I didn't catch that.",
    "Could you repeat that, please?",
    "Let me check that for you.",
    "One moment, please.",
    "Your {thing} is ready.",
    "Your {thing} will arrive on {day}, {month} {ordinal}.",
    "The {thing} has been cancelled.",
    "Would you like to change your {thing}?",
    "I have found {number} {unit} in your {thing}.",
    "Is there anything else I can help you with?",
    "Can you tell me your {thing} number?",
    "The number is {digits}.",
    "Please call {digits}, {digits}.",
    "It is {hour} {minute} in the {daytime}.",
    "We will meet at {hour} o'clock at the {place}.",
    "The train to {city} leaves at {hour} {minute}.",
    "The flight from {city} to {city} takes {number} {unit}.",
    "It will be {weather} in {city} tomorrow, with a high of {number} degrees.",
    "That costs {number} dollars and {number} cents.",
    "He was born on {month} {ordinal}, nineteen {tens}.",
    "In twenty {tens}, about {number} {unit} were enough.",
    "There are {number} {unit} left.",
    "{name} {surname} lives in {city}.",
    "Mister {surname} is waiting at the {place}.",
    "Doctor {surname} will see you on {day}.",
    "Where is the {adjective} {thing}?",
    "Why did {name} go to the {place}?",
    "When does the {place} open on {day}?",
    "What a {adjective} {thing}!",
    "I don't think the {thing} is {adjective}.",
    "She said that the {place} was {adjective}, but not very {adjective}.",
    "If you need {number} more {unit}, please tell {name}.",
    "Do you want the {adjective} one or the {adjective} one?",
    "{number}, {number}, {number}.",
    "About {number} thousand {number} {unit}.",
    "{number} percent of the {unit} were {adjective}.",
    "Your code is {letter}, {digits}.",
    "Goodbye, {name}, and have a nice {daytime}.",
    "See you on {day}!",
    "Turn left at the {place}, then go straight for {number} {unit}.",
    "I would like to book a table for {number}, under the name {surname}.",
    "{day}, the {ordinal} of {month}.",
    "Welcome to {city}!",
    "{adjective}.",
    "{name}?",
    "{number}.",
    "Okay.",
    "Yes.",
    "No.",
    "Thanks!",
    "Really?",
    "All right, let's begin.",
)


@dataclass(frozen=True, slots=True)
class Line:
    """A text for one voice."""

    text: str
    voice: str
    split: str  # "train" or "heldout"
    manner: str = PLAIN


def lines(hours: float, voices: tuple[str, ...], *, seed: int = 0) -> list[Line]:
    """Return held-out sentences for every voice, equal for all seeds, then training lines of about `hours`, with the
    voices in turn.
    """
    generator = random.Random(seed)
    sentences = _read(_SENTENCES)
    random.Random(0).shuffle(sentences)
    held_out = [sentence for sentence in sentences if len(sentence) in _HELD_OUT_LENGTHS][:NUM_HELD_OUT]
    excluded = set(held_out)
    result = [Line(text, voice, "heldout") for text in held_out for voice in voices]
    remaining_s = hours * 3600.0
    known = [text for text in (*sentences, *_read(_DEFINITIONS)) if text not in excluded]
    generator.shuffle(known)
    others = [manner for manner in MANNERS if manner != PLAIN]
    for text in _endless(generator, known):
        if remaining_s <= 0:
            return result
        manner = generator.choice(others) if generator.random() < MANNER_SHARE else PLAIN
        result.append(Line(text, voices[len(result) % len(voices)], "train", manner))
        tempo = min(1.0, MANNERS[manner].speed) * MANNERS[manner].pace
        remaining_s -= (len(text) / _CHARACTERS_PER_SECOND + _PAUSES_S) / tempo
    raise AssertionError("the generator of texts has no end")


def _read(texts: Path) -> list[str]:
    return gzip.decompress(texts.read_bytes()).decode().splitlines()


def _endless(generator: random.Random, sentences: list[str]) -> Iterator[str]:
    """Yield examples, joined examples, templates, single words and mixtures. No example repeats before all are used."""
    position = 0
    while True:
        kind = generator.random()
        if kind < 0.14:
            text = _from_template(generator)
        elif kind < 0.18:
            text = _few_words(generator, sentences)
        elif kind < 0.58:
            text = _mixture(generator, sentences)
        else:
            count = 1 if kind < 0.86 else generator.randint(2, 5)
            text = " ".join(sentences[(position + offset) % len(sentences)] for offset in range(count))
            position += count
        if _ALLOWED.fullmatch(text) and len(text) <= MAX_CHARACTERS:
            yield text


def _few_words(generator: random.Random, sentences: list[str]) -> str:
    words = re.findall(r"[A-Za-z']+", generator.choice(sentences))
    start = generator.randrange(len(words))
    text = " ".join(words[start : start + generator.randint(1, 3)])
    return text[0].upper() + text[1:] + generator.choice(".....?!")


def _mixture(generator: random.Random, sentences: list[str]) -> str:
    """Return pieces of several examples in a row. No two texts are alike, so they cannot be memorized."""
    pieces = []
    for _ in range(generator.randint(2, 6)):
        words = re.findall(r"[A-Za-z']+", generator.choice(sentences).lower())
        start = generator.randrange(len(words))
        pieces.append(" ".join(words[start : start + generator.randint(1, 5)]))
    text = "".join(piece + generator.choice((" ", " ", " ", ", ")) for piece in pieces).rstrip(", ")
    return text[0].upper() + text[1:] + generator.choice("....?!")


def _from_template(generator: random.Random) -> str:
    def fill(match: re.Match[str]) -> str:
        return _slot(generator, match[1])

    text = re.sub(r"\{(\w+)\}", fill, generator.choice(_TEMPLATES))
    return text[0].upper() + text[1:]


def _slot(generator: random.Random, name: str) -> str:
    match name:
        case "number":
            return cardinal(generator.randrange(generator.choice((20, 100, 1000, 10000))))
        case "digits":
            return " ".join(map(cardinal, generator.choices(range(10), k=generator.randint(3, 5))))
        case "hour":
            return cardinal(generator.randint(1, 12))
        case "minute":
            return cardinal(generator.randint(10, 59))
        case "tens":
            return cardinal(generator.randint(10, 99))
        case "daytime":
            return generator.choice(("morning", "afternoon", "evening"))
        case _:
            return generator.choice(_SLOTS[name])
