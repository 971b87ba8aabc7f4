"""A codec of 25 frames a second that exists nowhere: codebook 0 holds pitches, codebook 1 levels."""

from collections.abc import Sequence
from math import pi
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from deployments.codec.config import DecoderConfig, SpeechTokenizerConfig
from deployments.codec.decoder import Backend
from deployments.codec.state import DecoderState

FRAME_S = 0.04
_LOWEST_HZ, _OCTAVES = 40.0, 2.0


class TonesBackend(Backend):
    """Remembers of a stream the phase that its last sample had."""

    precision = "float32"

    def __init__(self, config: DecoderConfig, sample_rate: int, device: torch.device) -> None:
        self.config, self.device = config, device
        self.initial_state = DecoderState(0, (torch.zeros(1, dtype=torch.float64, device=device),))
        steps = torch.arange(config.codebook_size, dtype=torch.float64, device=device) / config.codebook_size
        self._turns = 2 * pi * _LOWEST_HZ * 2 ** (_OCTAVES * steps) / sample_rate  # of a sample, by code
        self._levels = (1 + steps) / 3

    @classmethod
    def load(cls, directory: Path, *, device: torch.device, precision: str) -> Self:
        config = SpeechTokenizerConfig.load(directory)
        return cls(config.decoder, config.sample_rate, device)

    def decode(self, codes: Tensor, states: Sequence[DecoderState]) -> tuple[Tensor, list[DecoderState]]:
        size = self.config.frame_samples
        turns = self._turns[codes[:, :, 0]].repeat_interleave(size, dim=1)
        levels = self._levels[codes[:, :, 1]].repeat_interleave(size, dim=1)
        before = torch.stack([state.tensors[0] for state in states])
        phases = (before + turns.cumsum(dim=1)) % (2 * pi)
        after = [
            DecoderState(state.position + codes.shape[1], (own[-1:].clone(),))
            for state, own in zip(states, phases, strict=True)
        ]
        return (levels * phases.sin()).float(), after
