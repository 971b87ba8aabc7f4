"""Manners of speaking, and instructions that ask for them."""

import random
from dataclasses import dataclass

from deployments.talker.text.tokenizer import TextTokenizer

_TURNS = 400  # instructions of each manner


@dataclass(frozen=True, slots=True)
class SpokenManner:
    """What the teacher's speech becomes, and words that ask for it."""

    speed: float = 1.0  # at which the teacher speaks
    pace: float = 1.0  # of what it said: it has no durations shorter than 25 ms, so that fast speech loses its words
    level_db: float = 0.0
    tilt_db: float = 0.0  # of harmonics, for each octave above 300 Hz
    adverbs: tuple[str, ...] = ()
    adjectives: tuple[str, ...] = ()

    @property
    def tempo(self) -> float:
        return self.speed * self.pace


PLAIN = ""
MANNERS = {
    PLAIN: SpokenManner(
        adverbs=(
            *("normally", "naturally", "clearly", "cheerfully", "sadly", "angrily", "warmly", "with emotion"),
            *("at a normal speed", "in a friendly tone", "like a pirate", "with a smile", "in an excited voice"),
            *("as a news reader", "with energy", "like a robot", "in a serious tone", "with a French accent"),
            *(
                "not too fast",
                "not too slowly",
                "at a normal volume",
                "loudly",
                "louder",
                "in a high voice",
                "in a deep voice",
            ),
        ),
        adjectives=("happy", "sad", "angry", "friendly", "calm", "dramatic", "excited", "warm", "serious", "natural"),
    ),
    "slow": SpokenManner(
        speed=0.72,
        adverbs=(
            *("slowly", "very slowly", "more slowly", "slower", "a bit slower", "much slower", "at a slow pace"),
            *("at a slower pace", "in a slow voice", "at a slow speed", "slowly and clearly", "without any hurry"),
        ),
        adjectives=("slow", "very slow", "slower", "leisurely", "slow-paced"),
    ),
    "fast": SpokenManner(
        pace=1.3,
        adverbs=(
            *("fast", "very fast", "faster", "a bit faster", "much faster", "quickly", "more quickly", "rapidly"),
            *("at a fast pace", "at a faster pace", "at high speed", "in a hurry", "as fast as you can"),
        ),
        adjectives=("fast", "very fast", "faster", "quick", "hurried", "rapid", "fast-paced"),
    ),
    "quiet": SpokenManner(
        level_db=-10.0,
        tilt_db=-2.0,
        adverbs=(
            *("quietly", "very quietly", "more quietly", "quieter", "softly", "very softly", "more softly", "gently"),
            *("in a quiet voice", "in a soft voice", "in a low volume", "less loudly", "in a whisper", "whispering"),
        ),
        adjectives=("quiet", "very quiet", "quieter", "soft", "softer", "hushed", "whispering"),
    ),
}
_VERBS = ("speak", "talk", "say it", "say this", "read", "read it", "read this", "please speak", "please read this", "")
_VERBS_BEFORE = (
    "you should speak",
    "I want you to talk",
    "can you speak",
    "could you please read this",
    "try to speak",
)
_NOUNS = ("voice", "tone", "delivery", "speech", "style")
_NOUN_PHRASES = ("use a {} {}", "a {} {}", "{} {}", "a {} {}, please", "speak with a {} {}", "the {} should be {}")
_FILLERS_BEFORE = ("", "", "", "please ", "hey, ", "now ", "okay, ", "for this one, ", "from now on, ", "just ")
_FILLERS_AFTER = ("", "", "", "", ", please", " please", ", thank you", " for me", ", as for a child", " this time")


def instructions(manner: str, draw: random.Random) -> str:
    """One way to ask for the manner; for `PLAIN` one that asks for what the voice cannot do."""
    words = MANNERS[manner]
    if draw.random() < 0.7:
        verb = draw.choice(_VERBS if draw.random() < 0.7 else _VERBS_BEFORE)
        asked = f"{verb} {draw.choice(words.adverbs)}".strip()
    else:
        phrase, parts = draw.choice(_NOUN_PHRASES), [draw.choice(words.adjectives), draw.choice(_NOUNS)]
        asked = phrase.format(*(parts[::-1] if phrase.startswith("the") else parts))
    if draw.random() < 0.5:
        asked = draw.choice(_FILLERS_BEFORE) + asked + draw.choice(_FILLERS_AFTER)
    asked += draw.choice(("", ".", ".", "!"))
    case = draw.random()
    return asked[0].upper() + asked[1:] if case < 0.5 else asked.upper() if case < 0.6 else asked


def turns(tokenizer: TextTokenizer, *, seed: int) -> dict[str, list[list[int]]]:
    """Token ids of many instructions of each manner, as they stand in a prompt."""
    draw = random.Random(seed)
    return {
        manner: [tokenizer.encode_instructions(instructions(manner, draw)) for _ in range(_TURNS)] for manner in MANNERS
    }
