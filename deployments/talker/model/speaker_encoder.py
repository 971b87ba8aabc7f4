"""Speaker encoder of base checkpoints, which converts a recording to the vector that replaces a named speaker.

The network is ECAPA-TDNN (Desplanques et al. 2020, arXiv:2005.07143) on a log-mel spectrogram, with the official tensor
names.
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from deployments.errors import InvalidRequest
from deployments.talker.model.model_config import SpeakerEncoderConfig

# Parameters of the spectrogram on which the released encoders were trained. Configuration files omit them.
_FFT_SIZE, _HOP, _MAX_HZ = 1024, 256, 12000.0
_PADDING = (_FFT_SIZE - _HOP) // 2


def reflected_convolution(inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> nn.Conv1d:
    """Return a convolution with reflection padding that keeps the length."""
    return nn.Conv1d(inputs, outputs, kernel, dilation=dilation, padding="same", padding_mode="reflect")


def time_delay_block(inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> nn.Sequential:
    """Return a convolution with ReLU: [batch, inputs, frames] -> [batch, outputs, frames]."""
    return nn.Sequential(OrderedDict(conv=reflected_convolution(inputs, outputs, kernel, dilation), relu=nn.ReLU()))


class Res2NetBlock(nn.Module):
    """Chain of channel groups. Each group is added to the previous group's result and then convolved."""

    def __init__(self, channels: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        width = channels // scale
        self.scale = scale
        self.blocks = nn.ModuleList(time_delay_block(width, width, kernel, dilation) for _ in range(scale - 1))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, frames] -> the same shape."""
        first, *rest = x.chunk(self.scale, dim=1)
        outputs = [first]
        previous: Tensor | None = None
        for block, group in zip(self.blocks, rest, strict=True):
            previous = block(group if previous is None else group + previous)
            outputs.append(previous)
        return torch.cat(outputs, dim=1)


class SqueezeExcitation(nn.Module):
    """Channel gates computed from the mean over time."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.conv1 = reflected_convolution(channels, squeezed)
        self.conv2 = reflected_convolution(squeezed, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, frames] -> the same shape."""
        mean = x.mean(dim=2, keepdim=True)
        return x * torch.sigmoid(self.conv2(F.relu(self.conv1(mean))))


class SERes2NetBlock(nn.Module):
    """TDNN, Res2Net, TDNN and squeeze-excitation with a residual connection."""

    def __init__(self, config: SpeakerEncoderConfig, layer: int) -> None:
        super().__init__()
        inputs, channels = config.enc_channels[layer - 1], config.enc_channels[layer]
        kernel, dilation = config.enc_kernel_sizes[layer], config.enc_dilations[layer]
        self.tdnn1 = time_delay_block(inputs, channels)
        self.res2net_block = Res2NetBlock(channels, config.enc_res2net_scale, kernel, dilation)
        self.tdnn2 = time_delay_block(channels, channels)
        self.se_block = SqueezeExcitation(channels, config.enc_se_channels)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, frames] -> [batch, channels, frames]. The residual requires inputs == channels."""
        out: Tensor = self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x)))) + x
        return out


class AttentiveStatisticsPooling(nn.Module):
    """Mean and standard deviation over time, weighted by attention over the whole recording."""

    def __init__(self, channels: int, attention_channels: int) -> None:
        super().__init__()
        self.tdnn = time_delay_block(channels * 3, attention_channels)
        self.conv = reflected_convolution(attention_channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, frames] -> [batch, 2 * channels, 1]."""
        uniform = torch.full_like(x[:, :1], 1.0 / x.shape[2])
        context = [part[:, :, None].expand_as(x) for part in _statistics(x, uniform)]
        attention = self.conv(torch.tanh(self.tdnn(torch.cat([x, *context], dim=1)))).softmax(dim=2)
        return torch.cat(_statistics(x, attention), dim=1)[:, :, None]


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = (weights * x).sum(dim=2)
    variance = (weights * (x - mean[:, :, None]).pow(2)).sum(dim=2)
    return mean, variance.clamp(1e-12).sqrt()


class SpeakerEncoder(nn.Module):
    """Network of a base checkpoint's `speaker_encoder.*` tensors, built from its `speaker_encoder_config`."""

    def __init__(self, shape: SpeakerEncoderConfig) -> None:
        super().__init__()
        self.shape = shape
        # The shortest audio whose spectrogram is longer than the reflection padding of each layer
        layers = zip(shape.enc_kernel_sizes, shape.enc_dilations, strict=True)
        reflected = max((kernel - 1) * dilation // 2 for kernel, dilation in layers)
        self.min_samples = max(_PADDING + 1, (reflected + 1) * _HOP)
        channels = shape.enc_channels
        first = time_delay_block(shape.mel_dim, channels[0], shape.enc_kernel_sizes[0], shape.enc_dilations[0])
        middle = (SERes2NetBlock(shape, layer) for layer in range(1, len(channels) - 1))
        self.blocks = nn.ModuleList([first, *middle])
        self.mfa = time_delay_block(channels[-1], channels[-1], shape.enc_kernel_sizes[-1], shape.enc_dilations[-1])
        self.asp = AttentiveStatisticsPooling(channels[-1], shape.enc_attention_channels)
        self.fc = reflected_convolution(channels[-1] * 2, shape.enc_dim)

    @torch.inference_mode()
    def embed(self, audio: Tensor) -> Tensor:
        """Convert mono float32 audio [samples] at the configured sample rate to a vector [enc_dim] in weight dtype.

        Raises InvalidRequest if the audio is too short for reflection padding.
        """
        if audio.shape[0] < self.min_samples:
            needed = f"{self.min_samples} samples at {self.shape.sample_rate} Hz"
            raise InvalidRequest(f"ref_audio is too short: it has {audio.shape[0]} of at least {needed}", "ref_audio")
        weight = self.fc.weight
        mel = log_mel(audio.to(weight.device), sample_rate=self.shape.sample_rate, num_mels=self.shape.mel_dim)
        out: Tensor = self(mel[None].to(weight.dtype))[0]
        return out

    def forward(self, mel: Tensor) -> Tensor:
        """Convert a log-mel spectrogram [batch, mels, frames] to vectors [batch, enc_dim]."""
        outputs = []
        for block in self.blocks:
            mel = block(mel)
            outputs.append(mel)
        pooled: Tensor = self.fc(self.asp(self.mfa(torch.cat(outputs[1:], dim=1))))
        return pooled[:, :, 0]


def log_mel(audio: Tensor, *, sample_rate: int, num_mels: int) -> Tensor:
    """Convert float32 audio [samples] to log magnitudes [mels, frames]."""
    padded = F.pad(audio[None, None], (_PADDING, _PADDING), mode="reflect")[0, 0]
    window = torch.hann_window(_FFT_SIZE, device=audio.device)
    spectrum = torch.stft(padded, _FFT_SIZE, _HOP, window=window, center=False, return_complex=True)
    magnitude = (torch.view_as_real(spectrum).pow(2).sum(-1) + 1e-9).sqrt()
    return (mel_filters(sample_rate, num_mels).to(audio.device) @ magnitude).clamp(min=1e-5).log()


def mel_filters(sample_rate: int, num_mels: int) -> Tensor:
    """Return Slaney's triangular filters with equal area, [mels, fft bins] float32. Uses float64 as librosa does."""
    bins = torch.linspace(0, sample_rate / 2, _FFT_SIZE // 2 + 1, dtype=torch.float64)
    top = _hz_to_mel(torch.tensor(_MAX_HZ, dtype=torch.float64))
    edges = _mel_to_hz(torch.linspace(0, float(top), num_mels + 2, dtype=torch.float64))
    widths = edges.diff()
    distances = edges[:, None] - bins[None]
    rising, falling = -distances[:-2] / widths[:-1, None], distances[2:] / widths[1:, None]
    triangles = torch.minimum(rising, falling).clamp(min=0)
    return (triangles * (2 / (edges[2:] - edges[:-2]))[:, None]).float()


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
