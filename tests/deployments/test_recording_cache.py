from pathlib import Path

import numpy as np

from deployments.codec.pool import codec
from deployments.recording_cache import VOICE_BYTES, RecordingCache


def test_only_the_voices_that_were_forgotten_last_are_remembered() -> None:
    results = RecordingCache[bytes](max_bytes=100, size=len)
    voices = [number.to_bytes(VOICE_BYTES, "big") for number in range(10_001)]
    results.forget(voices)
    results.put(voices[0], b"vector")
    results.put(voices[1], b"vector")
    assert (results.find(voices[0]), results.find(voices[1])) == (b"vector", None)


def test_a_codec_counts_what_it_keeps_in_bytes() -> None:
    kept = codec.Codec(Path(), None, None, 24000).references  # type: ignore[arg-type]
    for values, is_kept in ((codec._CODES_BYTES // 2, True), (codec._CODES_BYTES // 2 + 16, False)):
        kept.put(str(values).encode(), np.zeros((values // 16, 16), np.int16))
        assert (kept.find(str(values).encode()) is not None) is is_kept
