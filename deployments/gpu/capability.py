"""The compute capability of a GPU, by PyTorch. `card.py` says what each one can do."""

import torch

from deployments.gpu.card import AMPERE, Capability


def capability_of(device: torch.device) -> Capability:
    """The GPU's. Where no GPU is here, as in a prediction, it is one for which all kernels were written."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else AMPERE
