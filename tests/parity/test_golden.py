"""Talkray against what the official package said.

`python -m tools.experiments.parity.run --record` wrote it to tests/data.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deployments.codec.encoder import CodecEncoder
from deployments.protocol import Codes
from tools.experiments.parity.cases import CASES, DECODINGS, GOLDEN, WAV_DECODING, ParityCase, case_key, reference_audio
from tools.experiments.parity.ours import NAMES, Ours, codec_profile, golden_file, talker_digest

KINDS = sorted(NAMES)


def reference_codes(kind: str) -> Codes | None:
    codes: Codes | None = np.load(golden_file(kind)).get("reference/codes")
    return codes


DECODED_CASES = [
    pytest.param(case, decoding, id=f"{case.kind}/{case_key(case, decoding)}")
    for case in CASES
    for decoding in DECODINGS
]


@pytest.mark.parametrize("kind", KINDS)
def test_golden_files_belong_to_the_generated_weights(kind: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    golden, checkpoint = np.load(golden_file(kind)), tiny_checkpoint(kind)
    assert golden["checkpoint/talker"] == talker_digest(checkpoint)
    np.testing.assert_allclose(codec_profile(checkpoint), golden["checkpoint/codec"], rtol=1e-3)


@pytest.mark.parametrize(("case", "decoding"), DECODED_CASES)
def test_codes_equal_the_official_ones(case: ParityCase, decoding: str, ours: Callable[[str], Ours]) -> None:
    official = np.load(golden_file(case.kind))[f"codes/{case_key(case, decoding)}"]
    codes = ours(case.kind).codes(case, DECODINGS[decoding], reference_codes(case.kind), extent=GOLDEN)
    np.testing.assert_array_equal(codes, official)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}/{case.name}")
def test_audio_equals_the_official_one(case: ParityCase, ours: Callable[[str], Ours]) -> None:
    golden = np.load(golden_file(case.kind))
    codes, wav = (golden[f"{what}/{case_key(case, WAV_DECODING)}"] for what in ("codes", "wav"))
    audio = ours(case.kind).wav(case, codes[: GOLDEN.wav_frames], reference_codes(case.kind))
    np.testing.assert_allclose(audio, wav, atol=1e-5)


def test_speaker_vector_equals_the_official_one(ours: Callable[[str], Ours]) -> None:
    golden = np.load(golden_file("base"))
    np.testing.assert_allclose(ours("base").speaker(), golden["reference/speaker"], atol=1e-5)


def test_reference_codes_equal_the_official_ones(tiny_checkpoint: Callable[[str], Path]) -> None:
    encoder = CodecEncoder.load(tiny_checkpoint("base") / "speech_tokenizer")
    np.testing.assert_array_equal(encoder.encode(reference_audio()), reference_codes("base"))


def test_recorded_speech_ends_both_ways() -> None:
    golden = {kind: np.load(golden_file(kind)) for kind in KINDS}
    lengths = {len(file[key]) for file in golden.values() for key in file if key.startswith("codes/")}
    limit = GOLDEN.max_new_tokens - 1
    assert limit in lengths
    assert min(lengths) < limit
