"""Slots of a GPU decoder without a GPU: Triton's interpreter, and a stand-in for CUDA's streams and graphs."""

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from deployments.codec.backends import triton_slots
from deployments.codec.backends.torch_backend import TorchBackend
from deployments.codec.backends.triton_slots import PRECISIONS, TritonSlots
from deployments.codec.decoder import MIN_SNR_DB, CodecDecoder, snr_db, to_pcm16
from deployments.codec.fold import fold
from talkray_tools.unfolded_codec import DecoderNetwork
from tests.deployments.interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1: make kernels")


class Graphs:
    """Replays by running the work again, into the tensors that its capture returned."""

    def __init__(self, cuda_stream: object) -> None:
        self._works: dict[Hashable, tuple[Callable[[], Any], Any]] = {}

    def capture(self, key: Hashable, work: Callable[[], Any]) -> Any:
        self._works[key] = work, work()
        return self._works[key][1]

    def replay(self, key: Hashable) -> None:
        work, results = self._works[key]
        for old, new in zip(results or (), work() or (), strict=True):
            old.copy_(new)


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cuda(*of: object, **options: object) -> Mock:
        return Mock(query=lambda: True)

    empty = torch.empty
    for name in ("Stream", "Event", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, on_cuda)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch, "empty", lambda *of, pin_memory=False, **options: empty(*of, **options))
    monkeypatch.setattr(triton_slots, "Graphs", Graphs)
    for name, value in (("GPU_RAMP", (1, 2)), ("MAX_FRAMES", 2), ("MAX_CALL_FRAMES", 6)):
        monkeypatch.setattr(triton_slots, name, value)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # the interpreter's numpy
def test_streams_beside_one_that_overflows(network: DecoderNetwork) -> None:
    """Code 7 of the first codebook is beyond float16. Its stream goes on in float32, until another has its slot."""
    network.quantizer.rvq_first.vq.layers[0]._codebook.embedding_sum[7] *= 1e6
    folded = fold(network.state_dict(), network.config)
    slots = TritonSlots(
        folded, num_slots=3, batches=[3], device=torch.device("cpu"), precision=PRECISIONS[0],
        load_float32=lambda: CodecDecoder(TorchBackend(folded)),
    )  # fmt: skip
    slots.capture()
    sizes = (1, 2, 2, 1)
    codes = torch.randint(8, 32, (2, sum(sizes), 4), generator=torch.Generator().manual_seed(0))
    codes[1, 2, 0] = 7  # in the second call
    for slot, stream in ((2, 0), (0, 1)):
        slots.start_slot(slot)
        slots.write([slot] * sum(sizes), range(sum(sizes)), codes[stream].short())
    calls = [slots.decode([2, 0], size) for size in sizes]
    assert all(call.done for call in calls)
    heard = np.concatenate([np.stack([np.asarray(pcm) for pcm in call.result()]) for call in calls], axis=1)
    exact = torch.from_numpy(to_pcm16(network(codes)))
    assert slots.repaired == 1
    assert all(snr_db(exact[stream], torch.from_numpy(heard[stream])) >= MIN_SNR_DB for stream in range(2))
    slots.start_slot(0)
    slots.write([0, 0], range(2), codes[0, :2].short())
    (again,) = slots.decode([0], 2).result()
    assert snr_db(exact[0, : again.size], torch.from_numpy(np.asarray(again))) >= MIN_SNR_DB
    assert slots.repaired == 1
