from deployments.audio.recordings import ByRecording, Lookups


def recording(number: int) -> bytes:
    return bytes([number])


class Computing:
    """Counts how often each result is computed."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def get(self, results: ByRecording[bytes], number: int, size: int = 10) -> bytes:
        def compute() -> bytes:
            self.calls.append(number)
            return bytes([number]) * size

        return results.get(recording(number), compute)


def test_equal_recordings_are_computed_once() -> None:
    results, computing = ByRecording[bytes](max_bytes=100, size=len), Computing()
    assert [computing.get(results, number) for number in (1, 2, 1)] == [bytes([n]) * 10 for n in (1, 2, 1)]
    assert computing.calls == [1, 2]
    assert results.take_lookups() == Lookups(hits=1, misses=2)
    assert results.take_lookups() == Lookups()


def test_the_least_recently_used_gives_way() -> None:
    results, computing = ByRecording[bytes](max_bytes=25, size=len), Computing()
    for number in (1, 2, 1, 3, 1, 2):
        computing.get(results, number)
    assert computing.calls == [1, 2, 3, 2]


def test_what_is_larger_than_the_bound_is_not_kept() -> None:
    results, computing = ByRecording[bytes](max_bytes=25, size=len), Computing()
    for number, size in ((1, 10), (2, 26), (2, 26), (1, 10)):
        computing.get(results, number, size)
    assert computing.calls == [1, 2, 2]


def test_what_comes_from_elsewhere_replaces_what_is_there_within_the_bound() -> None:
    results = ByRecording[bytes](max_bytes=25, size=len)
    for key, result in ((b"a", b"1" * 10), (b"b", b"2" * 10), (b"a", b"3" * 15), (b"c", b"4" * 26)):
        results.keep(key, result)
    assert [results.find(key) for key in (b"a", b"b", b"c")] == [b"3" * 15, b"2" * 10, None]
    results.keep(b"d", b"5")
    assert [results.find(key) for key in (b"a", b"b", b"d")] == [None, b"2" * 10, b"5"]
    assert results.take_lookups() == Lookups()
