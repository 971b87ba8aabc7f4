"""Recordings on the streams of a GPU: what waits for what. A CPU does the work at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deployments.errors import InvalidRequest
from deployments.protocol import Reference
from deployments.talker.runner import recording_encoder
from tests.records import Record


def test_recordings_on_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    record, names, zeros = Record(), count(1), torch.zeros

    class Stream:
        def __init__(self, _: object) -> None:
            self.name = f"stream {next(names)}"

        def wait_stream(self, other: "Stream") -> None:
            record(f"  {self.name} waits for {other.name}")

    class Graphs:
        def __init__(self, stream: Stream) -> None:
            self._name, self._kept = stream.name, dict[int, tuple[Callable[[], Tensor], Tensor]]()

        def capture(self, size: int, work: Callable[[], Tensor]) -> Tensor:
            record(f"  {self._name} captures", size)
            self._kept[size] = work, work()
            return self._kept[size][1]

        def replay(self, size: int) -> None:
            record(f"  {self._name} replays", size)
            self._kept[size][1].copy_(self._kept[size][0]())

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        record(f"  on {stream.name}")
        yield
        record(f"  leaves {stream.name}")

    def sums(audio: Tensor, num_samples: Tensor) -> Tensor:
        if num_samples == 305:
            raise torch.OutOfMemoryError
        return torch.tensor([float(audio.sum()), len(audio), int(num_samples)])

    def check(num_samples: int) -> None:
        if num_samples < 5:
            raise InvalidRequest("too short", "ref_audio")

    event = SimpleNamespace(record=record.fake("recorded"), query=lambda: True, synchronize=record.fake("waited for"))
    for name, fake in (("Stream", Stream), ("stream", on), ("Event", lambda: event)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
    monkeypatch.setattr(recording_encoder, "Graphs", Graphs)
    speaker: Any = SimpleNamespace(shape=SimpleNamespace(sample_rate=10), vector=sums, check=check)
    codec: Any = SimpleNamespace(frame_samples=4, codes=lambda audio, n: torch.arange(len(audio) // 4)[:, None] + n)
    for encoder in (codec, None):
        recordings = recording_encoder.RecordingEncoder(speaker, encoder, torch.device("cpu"))
        recordings.capture()
        for num_samples in (4, 150, 19, 20, 21, 201, 305, 310, 313):
            for by_vector in (True, False) if encoder else (True,):
                record(f"{num_samples} samples", by_vector=by_vector)
                reference = Reference(np.ones(num_samples, np.float32), "x", x_vector_only=by_vector)
                started: Any = record.attempt("start", partial(recordings.start, reference))
                if not isinstance(started, InvalidRequest):
                    prompt = started.prompt()
                    codes = None if prompt.codes is None else prompt.codes[:, 0].tolist()
                    record("prompt", started.is_done, prompt.speaker.tolist(), codes)
    record.check("recordings")
