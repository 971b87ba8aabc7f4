"""Speaker encoder in base checkpoints, which converts a recording to the vector that replaces a named speaker.

The network is ECAPA-TDNN (Desplanques et al. 2020, arXiv:2005.07143) on a log-mel spectrogram, with the official tensor
names.
"""

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from deployments.errors import InvalidRequest
from deployments.talker.model.model_config import SpeakerEncoderConfig

# Parameters of the spectrograms that the released encoders were trained on. Configuration files omit them.
_FFT_SIZE, _HOP, _MAX_HZ = 1024, 256, 12000.0
_PADDING = (_FFT_SIZE - _HOP) // 2


class TimeDelayBlock(nn.Module):
    """Length-preserving convolution with reflection padding, followed by ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation)
        self.padding = (kernel - 1) * dilation // 2

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        """[batch, inputs, frames] -> [batch, outputs, frames]. The first `length` (int64 scalar) frames are valid."""
        return F.relu(self.conv(reflected(x, self.padding, length)))


def reflected(x: Tensor, padding: int, length: Tensor) -> Tensor:
    """[..., time] -> [..., time + 2 * padding], with reflection at the beginning and after `length` valid values."""
    if not padding:
        return x
    places = torch.arange(-padding, x.shape[-1] + padding, device=x.device).abs()
    places = torch.where(places < length, places, 2 * (length - 1) - places)
    return x.index_select(x.ndim - 1, places.clamp(min=0))


class Res2NetBlock(nn.Module):
    """Chain of channel groups. Each group is added to the previous group's result and then convolved."""

    def __init__(self, channels: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        width = channels // scale
        self.scale = scale
        self.blocks = nn.ModuleList(TimeDelayBlock(width, width, kernel, dilation) for _ in range(scale - 1))

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        """[batch, channels, frames] -> the same shape."""
        first, *rest = x.chunk(self.scale, dim=1)
        outputs = [first]
        previous: Tensor | None = None
        for block, group in zip(self.blocks, rest, strict=True):
            previous = block(group if previous is None else group + previous, length)
            outputs.append(previous)
        return torch.cat(outputs, dim=1)


class SqueezeExcitation(nn.Module):
    """Channel gates computed from the mean over time."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, squeezed, 1)
        self.conv2 = nn.Conv1d(squeezed, channels, 1)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        """[batch, channels, frames] -> the same shape."""
        mean = (x * _uniform(x, length)).sum(dim=2, keepdim=True)
        return x * torch.sigmoid(self.conv2(F.relu(self.conv1(mean))))


class SERes2NetBlock(nn.Module):
    """TDNN, Res2Net, TDNN and squeeze-excitation with a residual connection."""

    def __init__(self, config: SpeakerEncoderConfig, layer: int) -> None:
        super().__init__()
        inputs, channels = config.enc_channels[layer - 1], config.enc_channels[layer]
        kernel, dilation = config.enc_kernel_sizes[layer], config.enc_dilations[layer]
        self.tdnn1 = TimeDelayBlock(inputs, channels)
        self.res2net_block = Res2NetBlock(channels, config.enc_res2net_scale, kernel, dilation)
        self.tdnn2 = TimeDelayBlock(channels, channels)
        self.se_block = SqueezeExcitation(channels, config.enc_se_channels)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        """[batch, inputs, frames] -> [batch, channels, frames]. The residual requires inputs == channels."""
        y = x
        for layer in (self.tdnn1, self.res2net_block, self.tdnn2, self.se_block):
            y = layer(y, length)
        return x + y


class AttentiveStatisticsPooling(nn.Module):
    """Mean and standard deviation over time, weighted by attention over the entire recording."""

    def __init__(self, channels: int, attention_channels: int) -> None:
        super().__init__()
        self.tdnn = TimeDelayBlock(channels * 3, attention_channels)
        self.conv = nn.Conv1d(attention_channels, channels, 1)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        """[batch, channels, frames] -> [batch, 2 * channels, 1]."""
        uniform = _uniform(x, length)
        context = [part[:, :, None].expand_as(x) for part in _statistics(x, uniform)]
        scores = self.conv(torch.tanh(self.tdnn(torch.cat([x, *context], dim=1), length)))
        attention = scores.masked_fill(uniform == 0, -torch.inf).softmax(dim=2)
        return torch.cat(_statistics(x, attention), dim=1)[:, :, None]


def _uniform(x: Tensor, length: Tensor) -> Tensor:
    """Return weights [frames] that are equal for the valid frames and zero for the others."""
    return (torch.arange(x.shape[2], device=x.device) < length) / length.to(x.dtype)


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = (weights * x).sum(dim=2)
    variance = (weights * (x - mean[:, :, None]).pow(2)).sum(dim=2)
    return mean, variance.clamp(1e-12).sqrt()


class SpeakerEncoder(nn.Module):
    """Network for a base checkpoint's `speaker_encoder.*` tensors, built from its `speaker_encoder_config`."""

    def __init__(self, shape: SpeakerEncoderConfig) -> None:
        super().__init__()
        self.shape = shape
        # The shortest audio whose spectrogram is longer than the reflection padding of each layer
        layers = zip(shape.enc_kernel_sizes, shape.enc_dilations, strict=True)
        reflected = max((kernel - 1) * dilation // 2 for kernel, dilation in layers)
        self.min_samples = max(_PADDING + 1, (reflected + 1) * _HOP)
        channels = shape.enc_channels
        first = TimeDelayBlock(shape.mel_dim, channels[0], shape.enc_kernel_sizes[0], shape.enc_dilations[0])
        middle = (SERes2NetBlock(shape, layer) for layer in range(1, len(channels) - 1))
        self.blocks = nn.ModuleList([first, *middle])
        self.mfa = TimeDelayBlock(channels[-1], channels[-1], shape.enc_kernel_sizes[-1], shape.enc_dilations[-1])
        self.asp = AttentiveStatisticsPooling(channels[-1], shape.enc_attention_channels)
        self.fc = nn.Conv1d(channels[-1] * 2, shape.enc_dim, 1)

    def check(self, num_samples: int) -> None:
        """Raise InvalidRequest if a recording is too short for reflection padding."""
        if num_samples < self.min_samples:
            needed = f"{self.min_samples} samples at {self.shape.sample_rate} Hz"
            raise InvalidRequest(f"ref_audio is too short: it has {num_samples} of at least {needed}", "ref_audio")

    def embed(self, audio: Tensor) -> Tensor:
        """Convert mono float32 audio [samples] at the configured rate to a vector [enc_dim] in the weights' dtype.

        Raises InvalidRequest if the audio is too short.
        """
        self.check(len(audio))
        device = self.fc.weight.device
        return self.vector(audio.to(device), torch.tensor(len(audio), device=device))

    @torch.inference_mode()
    def vector(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Return the vector of the first `num_samples` (int64 scalar) samples, without waiting for the device."""
        mel = log_mel(audio, num_samples, sample_rate=self.shape.sample_rate, num_mels=self.shape.mel_dim)
        out: Tensor = self(mel[None].to(self.fc.weight.dtype), num_samples // _HOP)[0]
        return out

    def forward(self, mel: Tensor, length: Tensor) -> Tensor:
        """Convert log-mel spectrograms [batch, mels, frames], of `length` valid frames, to vectors [batch, enc_dim]."""
        outputs = []
        for block in self.blocks:
            mel = block(mel, length)
            outputs.append(mel)
        pooled: Tensor = self.fc(self.asp(self.mfa(torch.cat(outputs[1:], dim=1), length), length))
        return pooled[:, :, 0]


def log_mel(audio: Tensor, num_samples: Tensor, *, sample_rate: int, num_mels: int) -> Tensor:
    """Convert float32 audio [samples] to log magnitudes [mels, frames].

    The first `num_samples` (int64 scalar) samples give `num_samples // 256` valid frames.
    """
    window = torch.hann_window(_FFT_SIZE, device=audio.device)
    padded = reflected(audio, _PADDING, num_samples)
    spectrum = torch.stft(padded, _FFT_SIZE, _HOP, window=window, center=False, return_complex=True)
    magnitude = (torch.view_as_real(spectrum).pow(2).sum(-1) + 1e-9).sqrt()
    return (mel_filters(sample_rate, num_mels, audio.device) @ magnitude).clamp(min=1e-5).log()


@cache
def mel_filters(sample_rate: int, num_mels: int, device: torch.device) -> Tensor:
    """Return Slaney's triangular filters with equal area, [mels, fft bins] float32. Uses float64, like librosa."""
    bins = torch.linspace(0, sample_rate / 2, _FFT_SIZE // 2 + 1, dtype=torch.float64)
    top = _hz_to_mel(torch.tensor(_MAX_HZ, dtype=torch.float64))
    edges = _mel_to_hz(torch.linspace(0, float(top), num_mels + 2, dtype=torch.float64))
    widths = edges.diff()
    distances = edges[:, None] - bins[None]
    rising, falling = -distances[:-2] / widths[:-1, None], distances[2:] / widths[1:, None]
    triangles = torch.minimum(rising, falling).clamp(min=0)
    return (triangles * (2 / (edges[2:] - edges[:-2]))[:, None]).float().to(device)


# Slaney's mel scale: linear up to 1000 Hz, logarithmic above.
_LINEAR_HZ_PER_MEL = 200 / 3
_BREAK_HZ, _BREAK_MEL = 1000.0, 15.0
_LOG_STEP = math.log(6.4) / 27


def _hz_to_mel(hz: Tensor) -> Tensor:
    above = _BREAK_MEL + (hz.clamp(min=_BREAK_HZ) / _BREAK_HZ).log() / _LOG_STEP
    return torch.where(hz < _BREAK_HZ, hz / _LINEAR_HZ_PER_MEL, above)


def _mel_to_hz(mel: Tensor) -> Tensor:
    above = _BREAK_HZ * (_LOG_STEP * (mel - _BREAK_MEL)).exp()
    return torch.where(mel < _BREAK_MEL, mel * _LINEAR_HZ_PER_MEL, above)
