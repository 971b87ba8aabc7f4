"""A GPU reads a text where a CPU does: the embedded voice, given the frames that a CPU has made."""

import logging

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: make kernels installs it")

from deployments.protocol import SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import TalkerConfig, build_engine
from deployments.weights.store import locate
from tests.deployments.talker.driving import ask, chunks_of

pytestmark = pytest.mark.gpu
logger = logging.getLogger(__name__)

TEXTS = {
    "nora": "The train to the coast leaves at nine, and the next one only in the evening.",
    "felix": "Thank you for calling. Your order has been sent, and it will be with you on Tuesday.",
    "iris": "She opened the window, looked at the garden, and said nothing for a long time.",
    "hugo": "Please hold the line while I look for the number that you asked me about.",
}


def given(engine: Engine, request: SynthesisRequest, frames: np.ndarray) -> list[float]:
    """The reading of each frame, where `engine` is given all of them."""
    runner = engine.runner
    (sequence,) = [each for each in (engine.input_processor.build_sequence(7, request),) if each is not None]
    runner.blocks.allocate(sequence.id, sequence.num_positions + len(frames) + 1)
    sequence.row = 0
    runner.prefill([sequence])
    readings = torch.zeros((1, 2), pin_memory=True)
    with torch.inference_mode():
        for frame in frames:
            sequence.append(frame)
            batch = runner._as_batch([sequence])
            runner._send_frames([frame])
            runner.networks.feed_forced(batch.rows)
            runner._advance(batch, length=runner._length(0), readings=readings)
            torch.cuda.synchronize()
            sequence.progress.read(*readings[0].tolist(), sequence.prompt)
    runner.blocks.free(sequence.id)
    return list(sequence.progress.pop_places())


def begins(text: str, readings: list[float]) -> list[int]:
    """The first frame of each word."""
    starts = [place for place in range(len(text)) if place == 0 or text[place - 1] == " "]
    return [int(np.searchsorted(np.maximum.accumulate(readings), start)) for start in starts]


def test_words_begin_at_the_frames_at_which_they_begin_on_a_cpu() -> None:
    cpu = build_engine(locate("embedded"), TalkerConfig(device="cpu"))
    gpu = build_engine(locate("embedded"), TalkerConfig(device="cuda", deterministic=True))
    assert gpu.info.word_times
    for voice, text in TEXTS.items():
        request = ask(text, voice=voice, frames=150, word_times=True)
        chunks = chunks_of(cpu, request)
        frames = np.concatenate([chunk.codes for chunk in chunks])
        expected = [place for chunk in chunks for reading in chunk.readings for place in reading.chars]
        places = given(gpu, request, frames)
        assert len(expected) == len(places) == len(frames)
        late = np.subtract(begins(text, places), begins(text, expected))
        logger.info("%s, %d frames: words begin %s frames later", voice, len(frames), late.tolist())
        assert np.abs(late).max() <= 1
        assert begins(text, places)[-1] < len(frames)  # the last word as well
