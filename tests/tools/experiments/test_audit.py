"""The audit notices what it is for: samples that are missing, doubled, moved, or another stream's."""

from dataclasses import replace

import numpy as np
import pytest

from deployments.protocol import Codes, FinishReason, Pcm
from tools.experiments.gpu import audit as module
from tools.experiments.gpu.audit import Audit, audit
from tools.suites.listening import Heard

FRAME = 100


def decode(codes: Codes) -> Pcm:
    """A sound of its own for each code."""
    return np.concatenate(
        [np.random.default_rng(int(code)).integers(-9000, 9000, FRAME) for code in codes[:, 0]]
    ).astype(np.int16)


def stream(number: int, *, frames: int = 10, trimmed: int = 0) -> Heard:
    codes = (np.arange(frames)[:, None] + 50 * number).repeat(2, axis=1).astype(np.int16)
    return Heard(f"r{number}", codes, decode(codes)[trimmed:].tobytes(), (1.0 + number, 20.0), FinishReason.STOP)


def of(*streams: Heard) -> Audit:
    return audit(streams, decode, frame_samples=FRAME, max_trim=250)


def test_streams_as_their_codes_say_pass() -> None:
    done = of(stream(0), stream(1, trimmed=230), stream(2, frames=3))
    assert done.passed
    assert (done.streams, done.most_at_once, done.frames, done.samples) == (3, 3, 23, 2300 - 230)
    assert "| samples missing or doubled | 0 |" in done.table()


def spoilt(pcm: bytes, how: str) -> bytes:
    samples = np.frombuffer(pcm, np.int16)
    match how:
        case "missing":
            return np.delete(samples, slice(400, 500)).tobytes()
        case "doubled":
            return np.insert(samples, 500, samples[400:500]).tobytes()
        case "missing here and doubled there":
            return np.insert(np.delete(samples, slice(100, 150)), 700, samples[750:800]).tobytes()
        case "moved by one sample":
            return np.roll(samples, 1).tobytes()
        case _:
            return samples[::-1].tobytes()


@pytest.mark.parametrize("how", ["missing", "doubled", "missing here and doubled there", "moved by one sample", "else"])
@pytest.mark.parametrize("number", [0, 1])
def test_what_was_spoilt_is_noticed(how: str, number: int) -> None:
    whole = stream(number)
    done = of(stream(2), replace(whole, pcm=spoilt(whole.pcm, how)))
    assert not done.passed
    if how in ("missing", "doubled") and number == 0:
        assert len(done.miscounted) == 1


def test_another_ones_audio_and_a_stream_that_failed_are_noticed() -> None:
    assert not of(replace(stream(0), pcm=stream(2).pcm)).passed
    assert not of(stream(0), replace(stream(2), error="TalkerLost()")).passed


def test_the_shortest_and_the_longest_are_among_those_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RANDOM", 3)
    monkeypatch.setattr(module, "_EXTREME", 2)
    done = of(*(stream(number, frames=number + 1) for number in range(20)))
    lengths = sorted(each.frames for each in done.audited)
    assert (len(lengths), lengths[:2], lengths[-2:]) == (7, [1, 2], [19, 20])
