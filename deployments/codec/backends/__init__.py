"""Which backend decodes: the one place that names them all."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.cuda import get_device_capability, is_available  # `torch` becomes a module of this package

from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.gpu.card import AMPERE

if TYPE_CHECKING:  # these import this module, and a backend is imported where it is chosen
    from deployments.codec.decoder import Backend
    from deployments.codec.slots import SlotDecoder


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """The classes that decode a codec on a device."""

    backend: "type[Backend]"  # streams whose states go in and come back
    slots: "type[SlotDecoder]"  # streams whose states stay there: beside a talker


def choose_codec_backend(config: SpeechTokenizerConfig, device: torch.device) -> ChosenBackend:
    """A new backend is a line here, and a row in tests/deployments/codec/backends/test_backends.py."""
    from deployments.codec.backends.torch import TorchBackend  # with the kernels of cpu.py, where they fit
    from deployments.codec.backends.triton_slots import TritonSlots
    from deployments.codec.slots import PlainSlots

    is_suited = device.type == "cuda" and config.decoder.suits_matrix_units
    # Where no GPU is here, one is only predicted, and counts as a new one.
    if is_suited and (not is_available() or get_device_capability(device) >= AMPERE):
        return ChosenBackend(TorchBackend, TritonSlots)
    return ChosenBackend(TorchBackend, PlainSlots)
