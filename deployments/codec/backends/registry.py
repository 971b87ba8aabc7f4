"""Which backend decodes: the one place that names them all."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from deployments.codec.backends.torch_backend import TorchBackend
from deployments.codec.backends.triton_slots import TritonSlots
from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.decoder import Backend, CodecDecoder
from deployments.codec.slots import PlainSlots, SlotDecoder
from deployments.gpu.capability import capability_of
from deployments.gpu.card import AMPERE


@dataclass(frozen=True, slots=True)
class DecoderPair:
    """A row of BACKENDS: two classes that decode a codec, and where they do."""

    backend: type[Backend]  # streams whose states go in and come back: in the codec pool
    slots: type[SlotDecoder]  # streams whose states stay there: beside a talker
    decodes: Callable[[SpeechTokenizerConfig, torch.device], bool]  # this codec, on this device


def _on_matrix_units(config: SpeechTokenizerConfig, device: torch.device) -> bool:
    return device.type == "cuda" and config.decoder.suits_matrix_units and capability_of(device) >= AMPERE


# The first row that decodes a codec on a device is taken. A new backend is a row here, and a row in
# tests/deployments/codec/backends/test_backends.py.
BACKENDS = (
    DecoderPair(TorchBackend, TritonSlots, _on_matrix_units),
    DecoderPair(TorchBackend, PlainSlots, lambda config, device: True),  # with c_kernels.py, where it fits
)


def choose_decoders(config: SpeechTokenizerConfig, device: torch.device) -> DecoderPair:
    """The row of a codec on a device."""
    return next(row for row in BACKENDS if row.decodes(config, device))


def load_decoder(directory: Path, *, device: torch.device | str = "cpu", precision: str = "float32") -> CodecDecoder:
    """The decoder of `directory`, the checkpoint's `speech_tokenizer` folder. Raises CheckpointError."""
    place = torch.device(device)
    chosen = choose_decoders(SpeechTokenizerConfig.load(directory), place)
    return CodecDecoder(chosen.backend.load(directory, device=place, precision=precision))
