from pathlib import Path

import numpy as np
import pytest

from deployments.codec.pool import codec
from deployments.recording_cache import VOICE_BYTES, Lookups, RecordingCache


def recording(number: int) -> bytes:
    return bytes([number])


class Computing:
    def __init__(self) -> None:
        self.calls: list[int] = []

    def get(self, results: RecordingCache[bytes], number: int, size: int = 10) -> bytes:
        def compute() -> bytes:
            self.calls.append(number)
            return bytes([number]) * size

        return results.get(recording(number), compute)


def test_equal_recordings_are_computed_once() -> None:
    results, computing = RecordingCache[bytes](max_bytes=100, size=len), Computing()
    assert [computing.get(results, number) for number in (1, 2, 1)] == [bytes([n]) * 10 for n in (1, 2, 1)]
    assert computing.calls == [1, 2]
    assert results.take_lookups() == Lookups(hits=1, misses=2)
    assert results.take_lookups() == Lookups()


@pytest.mark.parametrize(("asked", "computed"), [
    ([(1, 10), (2, 10), (1, 10), (3, 10), (1, 10), (2, 10)], [1, 2, 3, 2]),  # the least recently used gives way
    ([(1, 10), (2, 26), (2, 26), (1, 10)], [1, 2, 2]),  # a result that is larger than the bound is not kept
])  # fmt: skip
def test_results_are_kept_within_the_bound(asked: list[tuple[int, int]], computed: list[int]) -> None:
    results, computing = RecordingCache[bytes](max_bytes=25, size=len), Computing()
    for number, size in asked:
        computing.get(results, number, size)
    assert computing.calls == computed


def test_what_comes_from_elsewhere_replaces_what_is_there_within_the_bound() -> None:
    results = RecordingCache[bytes](max_bytes=25, size=len)
    for key, result in ((b"a", b"1" * 10), (b"b", b"2" * 10), (b"a", b"3" * 15), (b"c", b"4" * 26)):
        results.put(key, result)
    assert [results.find(key) for key in (b"a", b"b", b"c")] == [b"3" * 15, b"2" * 10, None]
    results.put(b"d", b"5")
    assert [results.find(key) for key in (b"a", b"b", b"d")] == [None, b"2" * 10, b"5"]
    assert results.take_lookups() == Lookups()


def test_a_voice_that_is_forgotten_is_not_kept_again() -> None:
    """Requests that are under way bring results of it after it was deleted."""
    results = RecordingCache[bytes](max_bytes=100, size=len)
    gone, stays = b"g" * VOICE_BYTES, b"s" * VOICE_BYTES
    for key in (gone + b"take 1", gone + b"take 2", stays + b"take 1"):
        results.put(key, b"vector")
    assert results.forget([gone]) == 2
    assert results.find(gone + b"take 1") is None
    assert results.get(gone + b"take 2", lambda: b"late") == b"late"
    assert results.find(gone + b"take 2") is None
    assert results.find(stays + b"take 1") == b"vector"
    assert results.forget([gone]) == 0
    for number in range(10):  # what was dropped holds no room
        results.put(bytes([number]), b"0123456789")
    assert results.find(bytes([0])) == b"0123456789"


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
