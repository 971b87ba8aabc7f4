"""Selection of the decoder backend. Only this module knows about all backends."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch

from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.slots import SlotDecoder
from deployments.gpu.capability import capability_of
from deployments.gpu.card import AMPERE

if TYPE_CHECKING:  # a talker on a GPU needs neither of them
    from deployments.codec.decoder import Backend, CodecDecoder


@dataclass(frozen=True, slots=True)
class DecoderPair:
    """Entry of BACKENDS: the names of two decoder classes, and the codecs and devices that they support."""

    backend_name: str  # for the codec pool, whose callers keep the stream states
    slots_name: str  # for a talker's device; the class itself keeps the stream states
    decodes: Callable[[SpeechTokenizerConfig, torch.device], bool]  # whether the pair supports a codec on a device

    @property
    def backend(self) -> "type[Backend]":
        backend: type[Backend] = resolve_name(self.backend_name)
        return backend

    @property
    def slots(self) -> type[SlotDecoder]:
        slots: type[SlotDecoder] = resolve_name(self.slots_name)
        return slots


_TORCH = "deployments.codec.backends.torch_backend:TorchBackend"
_TRITON_SLOTS = "deployments.codec.backends.triton_slots:TritonSlots"
_PLAIN_SLOTS = "deployments.codec.plain_slots:PlainSlots"
_DECODER = "deployments.codec.decoder:CodecDecoder"  # works with any backend


def _on_matrix_units(config: SpeechTokenizerConfig, device: torch.device) -> bool:
    return device.type == "cuda" and config.decoder.suits_matrix_units and capability_of(device) >= AMPERE


# The first entry that supports a codec on a device is used. A new backend needs an entry here, and an entry in
# tests/deployments/codec/backends/test_backends.py.
BACKENDS = (
    DecoderPair(_TORCH, _TRITON_SLOTS, _on_matrix_units),
    DecoderPair(_TORCH, _PLAIN_SLOTS, lambda config, device: True),  # uses c_kernels.py where possible
)


def choose_decoders(config: SpeechTokenizerConfig, device: torch.device) -> DecoderPair:
    """Return the first entry of BACKENDS that supports a codec on a device."""
    return next(row for row in BACKENDS if row.decodes(config, device))


def load_decoder(directory: Path, *, device: torch.device | str = "cpu", precision: str = "float32") -> "CodecDecoder":
    """Load the decoder in `directory`, the checkpoint's `speech_tokenizer` folder. Raises CheckpointError."""
    place = torch.device(device)
    chosen = choose_decoders(SpeechTokenizerConfig.load(directory), place)
    decoder: CodecDecoder = resolve_name(_DECODER)(chosen.backend.load(directory, device=place, precision=precision))
    return decoder
