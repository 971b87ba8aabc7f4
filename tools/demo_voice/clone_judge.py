"""Check that a clone made by `embedded-base` is closer to its recording's speaker than to other speakers.

    python -m tools.demo_voice.clone_judge --wheels DIR  # of hibari-tts 0.2.1 and Resemblyzer 0.1.4

The teacher records two sentences as each of the eight speakers, and as strangers with random size, pitch and melody.
Resemblyzer's network (Apache-2.0) compares the speech of `embedded-base` with these recordings.
"""

import argparse
import logging
import sys
import zipfile
from collections.abc import Mapping
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.config import TalkerConfig
from deployments.embedded_voice.checkpoint import EMBEDDED_BASE
from deployments.protocol import ALL_FRAMES, Reference, SynthesisRequest
from deployments.talker.engine.startup import StartClock, load_engine
from deployments.weights.store import locate
from talkray_tools.recogniser import Moonshine, plain_words, word_errors
from talkray_tools.speaker_encoder import VoiceJudge
from tools.demo_voice.speakers import VOICES, Speaker
from tools.demo_voice.teacher import SAMPLE_RATE, Teacher

logger = logging.getLogger(__name__)

Audio = NDArray[np.float32]

_STRANGERS = 14
_RECORDED = (
    "He had never grown accustomed to the monotony of his work, and so he left the town.",
    "The period covered the turn of the century, which was a time of many changes.",
)
_RECORDED_LATER = "It will take money, good planning and above all some patience."
_SPOKEN = (
    "The boat drifted slowly on the lake in the evening.",
    "They were waiting for the train to come from the city.",
)


def strangers(seed: int = 5) -> dict[str, Speaker]:
    """Return speakers other than the eight. Every second one has a deep voice."""
    draw = np.random.default_rng(seed)
    return {
        f"stranger {number}": Speaker(
            Fraction(int(draw.integers(80, 114)), 100),
            pitch=float(draw.uniform(0.6, 0.85) if number % 2 else draw.uniform(0.9, 1.15)),
            melody=float(draw.uniform(0.8, 1.25)),
            tilt_db=float(draw.uniform(-1.5, 1.5)),
            tremor=float(draw.uniform(0, 0.03)),
            speed=float(draw.uniform(0.9, 1.1)),
        )
        for number in range(_STRANGERS)
    }


def cloned(recordings: Mapping[str, Audio]) -> dict[str, list[Audio]]:
    """Return the sentences of _SPOKEN, spoken by `embedded-base` in the voice of each recording."""
    asked = [(name, text) for name in recordings for text in _SPOKEN]
    config = TalkerConfig(max_num_seqs=16, max_num_waiting=len(asked), threads=1)
    engine = load_engine(locate(EMBEDDED_BASE), config, StartClock())
    for number, (name, text) in enumerate(asked):
        reference = Reference(recordings[name], x_vector_only=True)
        synthesis = SynthesisRequest(
            "clone",
            text,
            language="english",
            sampling=engine.model_config.generation,
            seed=number,
            reference=reference,
            gpu_frames=ALL_FRAMES,
        )
        engine.add(number, synthesis)
    spoken: list[list[bytes]] = [[] for _ in asked]
    while not engine.is_idle:
        for number, chunk in engine.step().chunks:
            spoken[number].append(chunk.pcm or b"")
    audio = [np.frombuffer(b"".join(each), np.int16).astype(np.float32) * np.float32(1 / 32768) for each in spoken]
    return {name: [audio[number] for number, (whose, _) in enumerate(asked) if whose == name] for name in recordings}


def compared(speech: Mapping[str, Tensor], recordings: Mapping[str, Tensor]) -> str:
    """Describe how similar each speaker's speech is to their own recording, and to those of the others."""
    names = list(recordings)
    alike = torch.stack([speech[name] for name in names]) @ torch.stack([recordings[name] for name in names]).T
    own = alike.diagonal()
    others = alike[~torch.eye(len(names), dtype=torch.bool)].view(len(names), -1)
    nearer, nearest = int((own > others.mean(1)).sum()), int((own > others.amax(1)).sum())
    return (
        f"cosine with its own recording {own.mean():.3f}, with others {others.mean():.3f}; of {len(names)} its own is"
        f" nearer than the average of the others for {nearer}, nearest of all for {nearest}"
    )


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_voice.clone_judge")
    parser.add_argument("--wheels", type=Path, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    groups = {"strangers": list(strangers()), "the eight": list(VOICES)}
    VOICES.update(strangers())
    (wheel,) = options.wheels.glob("Resemblyzer-*.whl")
    judge = VoiceJudge(BytesIO(zipfile.ZipFile(wheel).read("resemblyzer/pretrained.pt")), SAMPLE_RATE)
    teacher = Teacher.load(options.wheels)
    recordings = {
        name: np.concatenate([teacher.speak(text, name, seed=seed).audio for seed, text in enumerate(_RECORDED)])
        for name in VOICES
    }
    again = {name: judge.vector(teacher.speak(_RECORDED_LATER, name, seed=9).audio) for name in VOICES}
    spoken = cloned(recordings)
    known = {name: judge.vector(audio) for name, audio in recordings.items()}
    clones = {name: judge.vector(np.concatenate(audio)) for name, audio in spoken.items()}
    for group, names in groups.items():
        own = {name: known[name] for name in names}
        logger.info("%s, the same speaker again: %s", group, compared(again, own))
        logger.info("%s, the clone: %s", group, compared(clones, own))
    moonshine = Moonshine()
    said = [(plain_words(text), audio) for each in spoken.values() for text, audio in zip(_SPOKEN, each, strict=True)]
    wrong = sum(word_errors(words, plain_words(moonshine.transcribe(audio, SAMPLE_RATE))) for words, audio in said)
    logger.info("Moonshine tiny gets %d of %d words of the clones wrong", wrong, sum(len(words) for words, _ in said))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
