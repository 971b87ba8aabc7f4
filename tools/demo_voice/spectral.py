"""Spectrograms, and spectral distances between a reconstruction and its recording."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

_MEL_SCALES = ((128, 10), (256, 20), (512, 40), (1024, 80), (2048, 128))  # window, bands
_STFT_SIZES = (512, 1024, 2048)
_FLOOR = 1e-3  # minimum magnitude before the logarithm; smaller values are silence


class LogMel(nn.Module):
    """Spectrogram with a resolution of a hundredth of a second."""

    WINDOW, STEP, BANDS = 1024, 240, 80  # samples, samples, bands
    window: Tensor
    filters: Tensor

    def __init__(self, sample_rate: int) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(self.WINDOW), persistent=False)
        self.register_buffer("filters", mel_filters(sample_rate, self.WINDOW, self.BANDS), persistent=False)

    def forward(self, audio: Tensor) -> Tensor:
        """[B, samples] -> [B, bands, samples / STEP]."""
        padding = (self.WINDOW - self.STEP) // 2
        framed = F.pad(audio, (padding, padding))
        spectrum = torch.stft(framed, self.WINDOW, self.STEP, window=self.window, center=False, return_complex=True)
        mel = self.filters @ (spectrum.real.square() + spectrum.imag.square()).clamp(min=1e-8).sqrt()
        return mel.clamp(min=_FLOOR).log()


class SpectralLoss(nn.Module):
    """Log-mel distance over several window sizes, and the distances of linear magnitudes."""

    def __init__(self, sample_rate: int) -> None:
        super().__init__()
        self.sizes = sorted({size for size, _ in _MEL_SCALES} | set(_STFT_SIZES))
        for size in self.sizes:
            self.register_buffer(f"window_{size}", torch.hann_window(size), persistent=False)
        for size, bands in _MEL_SCALES:
            self.register_buffer(f"mel_{size}", mel_filters(sample_rate, size, bands), persistent=False)

    def forward(self, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """[B, samples] twice -> mean absolute log-mel distance, and spectral convergence plus log magnitude."""
        mel, linear = [], []
        for size in self.sizes:
            a, b = self._magnitudes(ours, size), self._magnitudes(theirs, size)
            if hasattr(self, f"mel_{size}"):
                filters = self.get_buffer(f"mel_{size}")
                mel.append(_log_distance(filters @ a, filters @ b))
            if size in _STFT_SIZES:
                convergence = torch.linalg.vector_norm(a - b) / (torch.linalg.vector_norm(b) + 1e-6)
                linear.append(convergence + _log_distance(a, b))
        return torch.stack(mel).mean(), torch.stack(linear).mean()

    def _magnitudes(self, audio: Tensor, size: int) -> Tensor:
        window = self.get_buffer(f"window_{size}")
        spectrum = torch.stft(audio, size, size // 4, window=window, return_complex=True)
        power = spectrum.real.square() + spectrum.imag.square()
        return power.clamp(min=_FLOOR**2 / 100).sqrt()


def _log_distance(a: Tensor, b: Tensor) -> Tensor:
    return (a.clamp(min=_FLOOR).log() - b.clamp(min=_FLOOR).log()).abs().mean()


def mel_filters(sample_rate: int, size: int, bands: int) -> Tensor:
    """Return averaging triangular filters of equal width on the mel scale, [bands, size // 2 + 1]."""
    top = 2595 * np.log10(1 + sample_rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1)
    spacing = sample_rate / size
    edges = np.maximum.accumulate(np.maximum(edges, np.arange(bands + 2) * spacing * 0.5))
    frequencies = np.arange(size // 2 + 1) * spacing
    rising = (frequencies - edges[:-2, None]) / np.maximum(edges[1:-1] - edges[:-2], spacing)[:, None]
    falling = (edges[2:, None] - frequencies) / np.maximum(edges[2:] - edges[1:-1], spacing)[:, None]
    triangles = np.maximum(0, np.minimum(np.minimum(rising, falling), 1))
    triangles /= np.maximum(triangles.sum(axis=1, keepdims=True), 1e-6)
    return torch.from_numpy(triangles).float()
