import pytest
import torch

from deployments.errors import EngineError
from deployments.talker.state.kv_cache import BESIDE_BYTES, CONTEXT_BYTES, GIB, CacheBounds, GpuMemory

TOTAL = 80 * GIB
CUDA = torch.device("cuda")


class FakeGpu:
    def __init__(self) -> None:
        self.free = TOTAL - GIB // 2  # a context is there

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, TOTAL


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setattr(torch.cuda, "mem_get_info", fake.mem_get_info)
    return fake


def bounds(fraction: float, *, least: int = GIB, most: int = 1000 * GIB) -> CacheBounds:
    return CacheBounds(fraction, least, most)


def test_the_cache_gets_what_the_share_leaves(gpu: FakeGpu) -> None:
    memory = GpuMemory(CUDA)
    gpu.free -= 5 * GIB
    half, whole = memory.kv_bytes(bounds(0.5)), memory.kv_bytes(bounds(0.75))
    assert whole - half == TOTAL // 4
    assert half == TOTAL // 2 - 5 * GIB - BESIDE_BYTES


def test_the_cache_is_never_larger_than_useful(gpu: FakeGpu) -> None:
    assert GpuMemory(CUDA).kv_bytes(bounds(0.9, most=3 * GIB)) == 3 * GIB


def test_what_others_use_is_not_given_away(gpu: FakeGpu) -> None:
    gpu.free = 20 * GIB
    memory = GpuMemory(CUDA)
    gpu.free -= 5 * GIB
    assert memory.kv_bytes(bounds(0.9)) == 15 * GIB - (BESIDE_BYTES - CONTEXT_BYTES)  # its own context is there


def test_too_small_a_share_names_what_is_needed_and_what_helps(gpu: FakeGpu) -> None:
    memory = GpuMemory(CUDA)
    gpu.free -= 4 * GIB
    with pytest.raises(EngineError) as caught:
        memory.kv_bytes(bounds(0.05))
    message = str(caught.value)
    assert "talker.gpu_memory_fraction 0.05 allows 4.0 GiB of 80.0 GiB" in message
    assert "4.0 GiB for weights and codec" in message
    needed = float(message.split("the engine needs ")[1].split(" ")[0])
    assert memory.kv_bytes(bounds((needed + 0.1) / 80)) >= GIB
    for setting in ("talker.max_model_len", "talker.max_num_seqs", "0.6B"):
        assert setting in message


def test_a_crowded_gpu_is_named_as_the_reason(gpu: FakeGpu) -> None:
    gpu.free = 2 * GIB
    memory = GpuMemory(CUDA)
    with pytest.raises(EngineError, match=r"others use 77\.4 GiB of 80\.0 GiB"):
        memory.kv_bytes(bounds(0.9, least=2 * GIB))
