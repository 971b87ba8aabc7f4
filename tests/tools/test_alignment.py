"""The head that follows the text: the embedded voice names its own."""

from deployments.config import TalkerConfig
from deployments.protocol import GenerateRequest, Sampling, SynthesisRequest
from deployments.talker.loading import build_engine
from deployments.weights.store import locate
from talkray_tools.alignment import find_head
from tests.deployments.talker.driving import speak

TEXTS = ("Hello! This is a plain sentence.", "She has three small boats in the harbour.")


def test_the_embedded_voices_head_is_the_one_that_it_names() -> None:
    directory = locate("embedded", report=lambda line: None)
    engine = build_engine(directory, TalkerConfig(device="cpu", dtype="float32", threads=1, max_num_seqs=1))
    spoken = []
    for seed, text in enumerate(TEXTS):
        synthesis = SynthesisRequest("x", text, voice="nora", seed=seed, sampling=Sampling(max_new_tokens=100))
        spoken.append((GenerateRequest(synthesis), speak(engine, GenerateRequest(synthesis)).codes))
    best, *_ = find_head(engine, spoken)
    assert (best.layer, best.head) == engine.model.text.alignment_head
    assert best.follows
