"""Networks that judge the codec in training: discriminators of waveform periods and of spectrograms, and a
classifier of sounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tools.demo_voice.shape import NUM_PHONES
from tools.demo_voice.spectral import LogMel

_PERIODS = (2, 3, 5, 7, 11)
_PERIOD_CHANNELS = (32, 128, 256, 512, 512)
_RESOLUTIONS = (2048, 1024, 512)
_SPECTROGRAM_CHANNELS = 32
_SLOPE = 0.1

Features = list[Tensor]  # by layer; the last tensor is the score map


class PeriodDiscriminator(nn.Module):
    """Two-dimensional convolutions along every `period`-th sample."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.period = period
        sizes = (1, *_PERIOD_CHANNELS)
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv2d(before, after, (5, 1), (3, 1), padding=(2, 0))) for before, after in pairwise(sizes)
        )
        self.layers.append(weight_norm(nn.Conv2d(sizes[-1], 1, (3, 1), padding=(1, 0))))

    def forward(self, audio: Tensor) -> Features:
        """[B, samples] -> features."""
        x = F.pad(audio, (0, -audio.shape[1] % self.period)).view(len(audio), 1, -1, self.period)
        return _features(self.layers, x)


class SpectrogramDiscriminator(nn.Module):
    """Two-dimensional convolutions over the complex spectrogram of one resolution."""

    window: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("window", torch.hann_window(size), persistent=False)
        channels = _SPECTROGRAM_CHANNELS
        self.layers = nn.ModuleList([weight_norm(nn.Conv2d(2, channels, (3, 9), padding=(1, 4)))])
        for dilation in (1, 2, 4):
            layer = nn.Conv2d(channels, channels, (3, 9), (1, 2), padding=(dilation, 4), dilation=(dilation, 1))
            self.layers.append(weight_norm(layer))
        self.layers.append(weight_norm(nn.Conv2d(channels, channels, (3, 3), padding=(1, 1))))
        self.layers.append(weight_norm(nn.Conv2d(channels, 1, (3, 3), padding=(1, 1))))

    def forward(self, audio: Tensor) -> Features:
        """[B, samples] -> features."""
        with torch.autocast(audio.device.type, enabled=False):
            spectrum = torch.stft(
                audio.float(), self.size, self.size // 4, window=self.window, normalized=True, return_complex=True
            )
        return _features(self.layers, torch.view_as_real(spectrum).permute(0, 3, 2, 1))


def _features(layers: nn.ModuleList, x: Tensor) -> Features:
    features = []
    for layer in layers[:-1]:
        x = F.leaky_relu(layer(x), _SLOPE)
        features.append(x)
    return [*features, layers[-1](x)]


class SoundClassifier(nn.Module):
    """Classifies the sound of each part of a frame, to check that a reconstruction says the same as the recording."""

    _CHANNELS, _BLOCKS, _DROPOUT = 256, 3, 0.1

    def __init__(self, sample_rate: int) -> None:
        super().__init__()
        self.mel = LogMel(sample_rate)
        width = self._CHANNELS
        self.first = nn.Conv1d(LogMel.BANDS, width, 5, padding=2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GELU(), nn.Conv1d(width, width, 5, padding=2), nn.GELU(), nn.Conv1d(width, width, 1))
            for _ in range(self._BLOCKS)
        )
        self.last = nn.Sequential(nn.GELU(), nn.Conv1d(width, width, 4, stride=2, padding=1), nn.GELU())
        self.scores = nn.Conv1d(width, NUM_PHONES, 3, padding=1)

    def forward(self, audio: Tensor) -> list[Tensor]:
        """[B, samples] -> features of each layer; the last are the scores [B, NUM_PHONES, frames * parts]."""
        features = [self.first(F.dropout(self.mel(audio), self._DROPOUT, self.training))]
        for block in self.blocks:
            features.append(features[-1] + block(features[-1]))
        features.append(self.last(features[-1]))
        return [*features, self.scores(features[-1])]


class Discriminators(nn.Module):
    """All discriminators."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            [
                *(PeriodDiscriminator(period) for period in _PERIODS),
                *(SpectrogramDiscriminator(size) for size in _RESOLUTIONS),
            ]
        )

    def forward(self, audio: Tensor) -> list[Features]:
        """Return each discriminator's features of [B, samples]. On a GPU, the convolutions run in bfloat16."""
        with torch.autocast(audio.device.type, torch.bfloat16, enabled=audio.is_cuda):
            return [member(audio) for member in self.members]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Losses of the generator."""

    score: Tensor
    features: Tensor


def discriminator_loss(discriminators: Discriminators, real: Tensor, fake: Tensor) -> Tensor:
    """Return the least-squares loss, averaged over discriminators: target 1 for recordings [B, samples], else 0."""
    judged = discriminators(torch.cat((real, fake.detach())))
    losses = []
    for features in judged:
        for_real, for_fake = features[-1].float().chunk(2)
        losses.append((1 - for_real).square().mean() + for_fake.square().mean())
    return torch.stack(losses).mean()


def generator_loss(discriminators: Discriminators, real: Tensor, fake: Tensor) -> Judgement:
    """Return the mean distance of the scores from 1, and the mean relative distance of the inner features."""
    with torch.no_grad():
        wanted = discriminators(real)
    judged = discriminators(fake)
    scores = [(1 - features[-1].float()).square().mean() for features in judged]
    distances = [_distance(ours, theirs) for ours, theirs in zip(judged, wanted, strict=True)]
    return Judgement(torch.stack(scores).mean(), torch.stack(distances).mean())


def sound_loss(classifier: SoundClassifier, real: Tensor, ours: Tensor, phones: Tensor) -> Judgement:
    """Return the loss of the sounds [B, frames, parts] that are recognised in `ours`, and the distance of the features.

    Audio is [B, samples].
    """
    classifier.eval()
    with torch.no_grad():
        wanted = classifier(real)
    heard = classifier(ours)
    classifier.train()
    return Judgement(F.cross_entropy(heard[-1], phones.flatten(1)), _distance(heard, wanted))


def _distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    pairs = list(zip(ours[:-1], theirs[:-1], strict=True))
    return torch.stack(
        [(a.float() - b.float()).abs().mean() / (b.float().abs().mean() + 1e-6) for a, b in pairs]
    ).mean()
