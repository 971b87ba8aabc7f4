"""Look up a GPU's compute capability with PyTorch. `card.py` lists the features of each capability."""

import torch

from deployments.gpu.card import AMPERE, Capability


def capability_of(device: torch.device) -> Capability:
    """Return the GPU's compute capability. On a machine without a GPU, return Ampere's, to plan memory for it."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else AMPERE
