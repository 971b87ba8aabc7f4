"""The kinds of networks, and where each of them runs: the one place that names them all.

| kind    | class           | runs                                                    |
|---------|-----------------|---------------------------------------------------------|
| `fused` | `FusedNetworks` | on a GPU with Triton, in 16 bits, from Ampere on        |
| `cpu`   | `CpuNetworks`   | on a CPU, in float32, where the kernels in C fit        |
| `exact` | `ExactNetworks` | on any other CPU                                        |
| `plain` | `PlainNetworks` | on any other GPU; anywhere with `talker.kernels: plain` |

With `cpu` and `exact` a stream has the same codes alone, in a batch and resumed. `sampling/` says how each samples.
"""

import importlib.util

import torch

from deployments.gpu.capability import capability_of
from deployments.gpu.card import AMPERE
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.networks import cpu_networks
from deployments.talker.networks.cpu_networks import CpuNetworks
from deployments.talker.networks.frame_networks import FrameNetworks, NetworkKind
from deployments.talker.networks.plain_networks import ExactNetworks, PlainNetworks

# The fused networks are not among them: they share packed weights, and a CPU lacks Triton. See `build_runner`.
UNFUSED: dict[NetworkKind, type[FrameNetworks]] = {"cpu": CpuNetworks, "exact": ExactNetworks, "plain": PlainNetworks}


def choose_networks(kernels: str, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> NetworkKind:
    """The kind for a checkpoint on a device. `kernels` is the setting."""
    if kernels == "plain":
        return "plain"
    if device.type == "cpu":
        in_c = dtype is torch.float32 and cpu_networks.fits(config.talker, config.predictor)
        return "cpu" if in_c else "exact"
    has_kernels = capability_of(device) >= AMPERE and importlib.util.find_spec("triton") is not None
    return "fused" if dtype.itemsize == 2 and has_kernels else "plain"
