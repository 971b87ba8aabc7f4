"""Manners of speaking, and the instructions that request them."""

import random
from dataclasses import dataclass

from deployments.talker.text.tokenizer import TextTokenizer

_TURNS = 400  # instructions per manner


@dataclass(frozen=True, slots=True)
class SpokenManner:
    """Changes to the teacher's speech, and comma-separated words that request them."""

    adverbs: str
    adjectives: str
    speed: float = 2.0  # the teacher's maximum speed; above 1 its durations hardly change
    pace: float = 1.0  # of the recorded speech; the teacher's shortest duration is 25 ms, so fast speech is unclear
    level_db: float = 0.0
    tilt_db: float = 0.0  # change of harmonics per octave above 300 Hz


PLAIN = ""  # its instructions request things that the voice cannot do
MANNERS = {
    PLAIN: SpokenManner(
        "normally, naturally, clearly, cheerfully, sadly, angrily, warmly, with emotion, at a normal speed, loudly, "
        "in a friendly tone, like a pirate, with a smile, in an excited voice, as a news reader, with energy, louder, "
        "like a robot, in a serious tone, with a French accent, not too fast, not too slowly, at a normal volume, "
        "in a high voice, in a deep voice",
        "happy, sad, angry, friendly, calm, dramatic, excited, warm, serious, natural",
    ),
    "slow": SpokenManner(
        "slowly, very slowly, more slowly, slower, a bit slower, much slower, at a slow pace, at a slower pace, "
        "in a slow voice, at a slow speed, slowly and clearly, without any hurry",
        "slow, very slow, slower, leisurely, slow-paced",
        speed=0.7,
    ),
    "fast": SpokenManner(
        "fast, very fast, faster, a bit faster, much faster, quickly, more quickly, rapidly, at a fast pace, "
        "at a faster pace, at high speed, in a hurry, as fast as you can",
        "fast, very fast, faster, quick, hurried, rapid, fast-paced",
        pace=1.3,
    ),
    "quiet": SpokenManner(
        "quietly, very quietly, more quietly, quieter, softly, very softly, more softly, gently, in a quiet voice, "
        "in a soft voice, in a low volume, less loudly, in a whisper, whispering",
        "quiet, very quiet, quieter, soft, softer, hushed, whispering",
        level_db=-10.0,
        tilt_db=-2.0,
    ),
}
_ASKED = (
    "speak {adverb}, talk {adverb}, say it {adverb}, say this {adverb}, read {adverb}, read it {adverb}, {adverb}, "
    "read this {adverb}, you should speak {adverb}, I want you to talk {adverb}, try to speak {adverb}, "
    "can you speak {adverb}, could you please read this {adverb}, use a {adjective} {noun}, a {adjective} {noun}, "
    "{adjective} {noun}, speak with a {adjective} {noun}, the {noun} should be {adjective}"
)
_NOUNS = ("voice", "tone", "delivery", "speech", "style")
_BEFORE = ("", "", "", "", "", "please ", "hey, ", "now ", "okay, ", "for this one, ", "from now on, ", "just ")
_AFTER = ("", "", "", "", "", ", please", " please", ", thank you", " for me", ", as for a child", " this time")


def instructions(manner: str, draw: random.Random) -> str:
    """Return one way to request the manner."""
    asked = draw.choice(_ASKED.split(", ")).format(
        adverb=draw.choice(MANNERS[manner].adverbs.split(", ")),
        adjective=draw.choice(MANNERS[manner].adjectives.split(", ")),
        noun=draw.choice(_NOUNS),
    )
    asked = draw.choice(_BEFORE) + asked + draw.choice(_AFTER) + draw.choice(("", ".", ".", "!"))
    case = draw.random()
    return asked[0].upper() + asked[1:] if case < 0.5 else asked.upper() if case < 0.6 else asked


def turns(tokenizer: TextTokenizer, *, seed: int) -> dict[str, list[list[int]]]:
    """Return token ids of many instructions for each manner, in the format of a prompt."""
    draw = random.Random(seed)
    return {
        manner: [tokenizer.encode_instructions(instructions(manner, draw)) for _ in range(_TURNS)] for manner in MANNERS
    }
