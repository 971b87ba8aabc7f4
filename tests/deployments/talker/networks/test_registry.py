import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.embedded_voice import cpu_networks
from deployments.gpu.card import AMPERE, Capability
from deployments.talker.networks import registry
from deployments.talker.networks.frame_networks import NetworkKind
from deployments.talker.networks.registry import NETWORKS, choose_networks, networks_class

TURING: Capability = (7, 5)
MODEL: Any = SimpleNamespace(talker=None, predictor=None)
CPU, GPU = "cpu", "cuda"
HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(("kernels", "device", "dtype", "fits", "capability", "has_triton", "kind"), [
    ("auto", GPU, HALF, False, AMPERE, True, "fused"), ("auto", GPU, HALF, False, AMPERE, False, "plain"),
    ("auto", GPU, HALF, False, TURING, True, "plain"), ("auto", GPU, FULL, False, AMPERE, True, "plain"),
    ("plain", GPU, HALF, False, AMPERE, True, "plain"), ("auto", CPU, FULL, True, AMPERE, True, "cpu"),
    ("auto", CPU, FULL, False, AMPERE, True, "exact"), ("auto", CPU, HALF, True, AMPERE, True, "exact"),
    ("plain", CPU, FULL, True, AMPERE, True, "plain"),
])  # fmt: skip
def test_the_table_of_kinds(
    monkeypatch: pytest.MonkeyPatch, kernels: str, device: str, dtype: torch.dtype, fits: bool,
    capability: Capability, has_triton: bool, kind: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(registry, "capability_of", lambda _: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if has_triton else None)
    monkeypatch.setattr(cpu_networks, "fits", lambda *_: fits)
    assert choose_networks(kernels, MODEL, dtype=dtype, device=torch.device(device)) == kind


@pytest.mark.parametrize("kind", NETWORKS)
def test_each_kind_has_its_class(kind: NetworkKind) -> None:
    if kind == "fused":
        pytest.importorskip("triton", reason="needs Triton: make kernels installs it")
    assert networks_class(kind).kind == kind
