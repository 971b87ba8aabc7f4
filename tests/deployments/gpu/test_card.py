"""What each GPU is told: pure functions of its memory, capability and driver."""

import pytest

from deployments.gpu.card import AMPERE, Card, half_precision, remark, torch_cuda, unsupported_reason

GIB = 1 << 30


def card(name: str, capability: tuple[int, int], driver: str = "580.65.06") -> Card:
    return Card(name, capability, driver, 8 * GIB, 7 * GIB)


def test_a_line_of_nvidia_smi() -> None:
    line = "NVIDIA GeForce RTX 3050, 8.6, 570.133.07, 6144, 5800\n"
    assert Card.parse(line) == Card("NVIDIA GeForce RTX 3050", (8, 6), "570.133.07", 6144 << 20, 5800 << 20)
    for other in ("", "No devices were found", "NVIDIA GB10, 12.1, 580.95, [N/A], [N/A]"):
        assert Card.parse(other) is None


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 5), "float16"), (AMPERE, "bfloat16"), ((8, 6), "bfloat16"), ((9, 0), "bfloat16"), ((12, 0), "bfloat16")],
)
def test_turing_computes_in_float16(capability: tuple[int, int], dtype: str) -> None:
    assert half_precision(capability) == dtype
    assert bool(remark(card("a card", capability))) is (dtype == "float16")


@pytest.mark.parametrize(("name", "capability", "family"), [
    ("GTX 980", (5, 2), "Maxwell"), ("GTX 1080", (6, 1), "Pascal"), ("V100", (7, 0), "Volta"),
    ("K80", (3, 7), "too old"),
])  # fmt: skip
def test_cards_without_kernels_are_refused_by_name(name: str, capability: tuple[int, int], family: str) -> None:
    reason = unsupported_reason(card(name, capability), (13, 0))
    dotted = ".".join(map(str, capability))
    assert reason is not None
    assert reason.startswith(f"{name} has compute capability {dotted} ({family}), Talkray requires 7.5 (Turing)")
    assert "--config without num_gpus" in reason


@pytest.mark.parametrize(("driver", "cuda", "advice"), [
    ("550.54.15", (13, 0), "install driver 580 or newer"), ("470.223.02", (12, 8), "install driver 525 or newer"),
    ("550.54.15", (12, 8), None), ("580.65.06", (13, 2), None),
    ("580.65.06", None, "install the CUDA build"),  # a torch for CPUs
])  # fmt: skip
def test_the_driver_must_know_the_cuda_of_torch(driver: str, cuda: tuple[int, int] | None, advice: str | None) -> None:
    reason = unsupported_reason(card("RTX 3060", (8, 6), driver), cuda)
    assert reason is None if advice is None else advice in (reason or "")


def test_the_cuda_of_the_installed_torch() -> None:
    import torch

    version = torch.version.cuda
    assert torch_cuda() == (None if version is None else tuple(map(int, version.split("."))))
