"""The kinds of networks, and where each of them runs: the one place that names them all.

| kind    | class           | runs                                                    | codes are sampled by         |
|---------|-----------------|---------------------------------------------------------|------------------------------|
| `fused` | `FusedNetworks` | on a GPU with Triton, in 16 bits, from Ampere on        | Triton: kernels/sampler.py   |
| `cpu`   | `CpuNetworks`   | on a CPU, in float32, where the kernels in C fit        | C: kernels/cpu_kernels.c     |
| `exact` | `ExactNetworks` | on any other CPU                                        | C where it was built, else   |
|         |                 |                                                         | PyTorch: state/sampling.py   |
| `plain` | `PlainNetworks` | on any other GPU; anywhere with `talker.kernels: plain` | on a GPU PyTorch, on a CPU   |
|         |                 |                                                         | as `exact`                   |

With `cpu` and `exact` a stream has the same codes alone, in a batch and resumed. The three samplers choose the same
code: tests compare them on random logits.
"""

import importlib.util

import torch

from deployments.gpu.capability import capability_of
from deployments.gpu.card import AMPERE
from deployments.talker.kernels import cpu_kernels
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.networks.cpu_networks import CpuNetworks
from deployments.talker.networks.frame_networks import FrameNetworks, NetworkKind
from deployments.talker.networks.plain_networks import ExactNetworks, PlainNetworks

# The fused networks are not among them: they share packed weights, and a CPU lacks Triton. See `build_runner`.
UNFUSED: dict[NetworkKind, type[FrameNetworks]] = {"cpu": CpuNetworks, "exact": ExactNetworks, "plain": PlainNetworks}


def choose_networks(kernels: str, model: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> NetworkKind:
    """The kind for a checkpoint on a device. `kernels` is the setting."""
    if kernels == "plain":
        return "plain"
    if device.type == "cpu":
        in_c = dtype is torch.float32 and cpu_kernels.fits(model.talker, model.predictor)
        return "cpu" if in_c else "exact"
    has_kernels = capability_of(device) >= AMPERE and importlib.util.find_spec("triton") is not None
    return "fused" if dtype.itemsize == 2 and has_kernels else "plain"
