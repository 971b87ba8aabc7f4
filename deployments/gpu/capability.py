"""The compute capability of a GPU, by PyTorch. `card.py` lists the abilities of each one."""

import torch

from deployments.gpu.card import AMPERE, Capability


def capability_of(device: torch.device) -> Capability:
    """The GPU's capability. Without a GPU, as in a prediction: that of the first one that all kernels support."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else AMPERE
