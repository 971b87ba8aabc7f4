"""Captured encoders of recordings give the results of encoders that run as they are."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.codec.encoder import CodecEncoder
from deployments.errors import InvalidRequest
from deployments.protocol import Reference
from deployments.talker.engine.startup import load_speaker_encoder
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.model.speaker_encoder import SpeakerEncoder
from deployments.talker.runner.recording_encoder import RecordingEncoder

pytestmark = pytest.mark.gpu

SECONDS = (0.5, 2, 2.001, 5.3, 30)


@pytest.fixture(scope="module")
def codec(tiny_checkpoint: Callable[[str], Path]) -> CodecEncoder:
    return CodecEncoder.load(tiny_checkpoint("Base") / "speech_tokenizer", device="cuda")


@pytest.fixture(scope="module")
def speaker(tiny_checkpoint: Callable[[str], Path]) -> SpeakerEncoder:
    directory = tiny_checkpoint("Base")
    encoder = load_speaker_encoder(directory, ModelConfig.load(directory), device=torch.device("cuda"))
    assert encoder is not None
    return encoder


@pytest.fixture(scope="module")
def recordings(speaker: SpeakerEncoder, codec: CodecEncoder) -> RecordingEncoder:
    encoder = RecordingEncoder(speaker, codec, torch.device("cuda"))
    encoder.capture()
    return encoder


def recording(seconds: float) -> Reference:
    draw = np.random.default_rng(round(1000 * seconds))
    return Reference(draw.normal(0, 0.1, round(24000 * seconds)).astype(np.float32), "Said.")


def test_recordings_do_not_mix(recordings: RecordingEncoder, codec: CodecEncoder, speaker: SpeakerEncoder) -> None:
    references = [recording(seconds) for seconds in SECONDS]
    started = [recordings.start(reference) for reference in references]
    for reference, prompt in zip(references, [each.prompt() for each in started], strict=True):
        codes = codec.encode(reference.samples)
        assert prompt.codes is not None
        assert prompt.codes.shape == codes.shape
        assert (prompt.codes == codes).mean() > 0.99  # another order of summation may decide a tie
        vector = speaker.embed(torch.from_numpy(reference.samples)).cpu().numpy()
        np.testing.assert_allclose(prompt.speaker, vector, atol=1e-4 * np.abs(vector).max())


def test_a_voice_by_its_vector_has_no_codes(recordings: RecordingEncoder) -> None:
    encoding = recordings.start(Reference(recording(1).audio, x_vector_only=True))
    assert encoding.prompt().codes is None
    assert encoding.is_done


@pytest.mark.parametrize(("seconds", "text"), [(0.001, "too short"), (32, "too long: send at most 30 seconds")])
def test_other_lengths_are_refused(recordings: RecordingEncoder, seconds: float, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as refused:
        recordings.start(recording(seconds))
    assert refused.value.param == "ref_audio"
