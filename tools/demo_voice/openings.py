"""After the export: the silence that all speech of a voice begins with, so that nobody has to make it again.

    python -m tools.demo_voice.openings OUT/official OUT/compact

takes it from the first checkpoint and writes it into the config.json of both. Whatever was said in trials, the sound
came in the fourth frame or later. The frames are those of a sentence whose sound comes in the fifth: frames that stand
further from it say less of what follows.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from deployments.checkpoint import read_json
from deployments.config import TalkerConfig
from deployments.protocol import GenerateRequest, Sampling, SynthesisRequest
from deployments.talker.engine import Engine
from deployments.talker.loading import build_engine
from tools.demo_voice.shape import PHONES_PER_FRAME
from tools.demo_voice.train_talker import write_json

_SENTENCE = "she folded the letter twice and put it under the clock."
_FRAMES = 3
_GREEDY = Sampling(do_sample=False, subtalker_dosample=False, max_new_tokens=_FRAMES + 1)


def opening(engine: Engine, voice: str) -> list[list[int]]:
    """The first frames of a voice. Raises ValueError where they are not silent."""
    request = SynthesisRequest(
        voice, _SENTENCE, voice=voice, language="english", sampling=_GREEDY, leading_silence=True
    )
    engine.add(0, GenerateRequest(request))
    chunks = []
    while not engine.is_idle:
        chunks += [chunk.codes for _, chunk in engine.step().chunks]
    frames = np.concatenate(chunks)[:_FRAMES]
    if len(frames) < _FRAMES or frames[:, :PHONES_PER_FRAME].any():
        raise ValueError(f"{voice} does not begin with {_FRAMES} silent frames: {frames.tolist()}")
    rows: list[list[int]] = frames.tolist()
    return rows


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_voice.openings", description="Write the silence that voices begin with."
    )
    parser.add_argument("checkpoints", type=Path, nargs="+")
    checkpoints = parser.parse_args(arguments).checkpoints
    engine = build_engine(checkpoints[0], TalkerConfig(device="cpu"))
    openings = {voice: opening(engine, voice) for voice in engine.info.voices}
    for file in (checkpoint / "config.json" for checkpoint in checkpoints):
        config = read_json(file)
        write_json(file, {**config, "talkray": {**config["talkray"], "openings": openings}})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
