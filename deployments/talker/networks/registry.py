"""Kinds of networks and the devices on which they run. Only this module knows about all kinds.

| kind    | class           | runs                                                    |
|---------|-----------------|---------------------------------------------------------|
| `fused` | `FusedNetworks` | on a GPU with Triton, in 16 bits, from Ampere on        |
| `cpu`   | `CpuNetworks`   | on a CPU, in float32, if the C kernels support the size |
| `exact` | `ExactNetworks` | on any other CPU                                        |
| `plain` | `PlainNetworks` | on any other GPU; anywhere with `talker.kernels: plain` |

With `cpu` and `exact`, a stream has the same codes whether alone, in a batch, or resumed. Samplers are in `sampling/`.
"""

import importlib.util
from pkgutil import resolve_name

import torch

from deployments.gpu.capability import capability_of
from deployments.gpu.card import AMPERE
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.networks.frame_networks import FrameNetworks, NetworkKind

_HERE = "deployments.talker.networks"
_IN_C = "deployments.embedded_voice.cpu_networks"  # only for small networks, not for the released talkers
NETWORKS: dict[NetworkKind, str] = {
    "fused": f"{_HERE}.fused_networks:FusedNetworks",  # requires Triton, which does not run on CPUs
    "cpu": f"{_IN_C}:CpuNetworks",
    "exact": f"{_HERE}.plain_networks:ExactNetworks",
    "plain": f"{_HERE}.plain_networks:PlainNetworks",
}


def networks_class(kind: NetworkKind) -> type[FrameNetworks]:
    networks: type[FrameNetworks] = resolve_name(NETWORKS[kind])
    return networks


def choose_networks(kernels: str, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> NetworkKind:
    """Return the kind of networks for a checkpoint on a device. `kernels` is the value of `talker.kernels`."""
    if kernels == "plain":
        return "plain"
    if device.type == "cpu":
        in_c = dtype is torch.float32 and resolve_name(f"{_IN_C}:fits")(config.talker, config.predictor)
        return "cpu" if in_c else "exact"
    has_kernels = capability_of(device) >= AMPERE and importlib.util.find_spec("triton") is not None
    return "fused" if dtype.itemsize == 2 and has_kernels else "plain"
