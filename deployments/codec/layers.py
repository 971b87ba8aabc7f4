"""Causal streaming layers of the codec decoder, over [B, channels, time]. Parameters carry the checkpoint's names."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from deployments.codec.config import CONTEXT, RESIDUAL_DILATIONS
from deployments.codec.state import BatchState, StateLayout

_KERNEL_SIZE = CONTEXT + 1
_EXPANSION = 4


class CausalConv1d(nn.Module):
    """Stride-1 convolution whose left context is the end of what the stream fed it before."""

    def __init__(
        self,
        layout: StateLayout,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: int,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, dilation=dilation, groups=groups)
        self.context = (kernel_size - 1) * dilation
        self.slot = layout.reserve(in_channels, self.context) if self.context else -1

    def forward(self, x: Tensor, state: BatchState) -> Tensor:
        """[B, in, time] -> [B, out, time]."""
        if self.context:
            x = torch.cat((state.tensors[self.slot], x), dim=2)
            state.tensors[self.slot] = x[:, :, -self.context :].clone()  # a view would keep all of x alive
        out: Tensor = self.conv(x)
        return out


class CausalConvTranspose1d(nn.Module):
    """Upsampling convolution whose kernel spans one or two strides.

    A step makes `stride` samples of its own and, with the longer kernel, adds to the `stride` samples of the next step.
    What the last step adds to the future is the stream's state, and the bias is no part of it.
    """

    def __init__(
        self, layout: StateLayout, in_channels: int, out_channels: int, *, kernel_size: int, stride: int
    ) -> None:
        super().__init__()
        assert kernel_size in (stride, 2 * stride), (kernel_size, stride)
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, kernel_size, stride=stride)
        self.stride = stride
        self.overlaps = kernel_size > stride
        self.slot = layout.reserve(out_channels, 1, stride) if self.overlaps else -1

    def forward(self, x: Tensor, state: BatchState) -> Tensor:
        """[B, in, time] -> [B, out, stride * time]."""
        weight, bias = self.conv.weight, self.conv.bias
        assert bias is not None
        # One matrix product: torch's own transposed convolution takes many times as long on a CPU for few steps.
        product = x.transpose(1, 2) @ weight.flatten(1)  # [B, time, out * kernel]
        y = product.view(*product.shape[:2], *weight.shape[1:]).transpose(1, 2)  # [B, out, time, kernel]
        if self.overlaps:
            ahead = torch.cat((state.tensors[self.slot], y[..., self.stride :]), dim=2)
            state.tensors[self.slot] = ahead[:, :, -1:].clone()
            y = y[..., : self.stride] + ahead[:, :, :-1]
        return (y + bias[:, None, None]).flatten(2)


class Snake(nn.Module):
    """x + sin(x * exp(alpha))^2 / exp(beta), with both exponentials taken once by `prepare`."""

    frequency: Tensor  # [channels, 1]
    amplitude: Tensor  # [channels, 1]

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.register_buffer("frequency", None, persistent=False)
        self.register_buffer("amplitude", None, persistent=False)

    def prepare(self) -> None:
        """Take the exponentials of the parameters, which must be loaded."""
        self.frequency = self.alpha.detach().exp()[:, None]
        self.amplitude = 1.0 / (self.beta.detach().exp()[:, None] + 1e-9)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, time] -> [B, channels, time]."""
        squared_sine = (x * self.frequency).sin_().square_()
        return torch.addcmul(x, squared_sine, self.amplitude)


class ConvNeXtBlock(nn.Module):
    """Depthwise causal convolution and a two-layer perceptron over channels, added to the input."""

    def __init__(self, layout: StateLayout, channels: int) -> None:
        super().__init__()
        self.dwconv = CausalConv1d(layout, channels, channels, kernel_size=_KERNEL_SIZE, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, _EXPANSION * channels)
        self.pwconv2 = nn.Linear(_EXPANSION * channels, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor, state: BatchState) -> Tensor:
        """[B, channels, time] -> [B, channels, time]."""
        y = self.norm(self.dwconv(x, state).transpose(1, 2))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        out: Tensor = x + y.transpose(1, 2)
        return out


class ResidualUnit(nn.Module):
    """Dilated convolution and a pointwise one, each behind a snake, added to the input."""

    def __init__(self, layout: StateLayout, channels: int, *, dilation: int) -> None:
        super().__init__()
        self.act1 = Snake(channels)
        self.conv1 = CausalConv1d(layout, channels, channels, kernel_size=_KERNEL_SIZE, dilation=dilation)
        self.act2 = Snake(channels)
        self.conv2 = CausalConv1d(layout, channels, channels, kernel_size=1)

    def forward(self, x: Tensor, state: BatchState) -> Tensor:
        """[B, channels, time] -> [B, channels, time]."""
        y = self.conv1(self.act1(x), state)
        out: Tensor = x + self.conv2(self.act2(y), state)
        return out


class UpsamplingBlock(nn.Module):
    """Snake, upsampling by `stride` and three residual units."""

    def __init__(self, layout: StateLayout, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            [
                Snake(in_channels),
                CausalConvTranspose1d(layout, in_channels, out_channels, kernel_size=2 * stride, stride=stride),
                *(ResidualUnit(layout, out_channels, dilation=dilation) for dilation in RESIDUAL_DILATIONS),
            ]
        )

    def forward(self, x: Tensor, state: BatchState) -> Tensor:
        """[B, in, time] -> [B, out, stride * time]."""
        activation, upsample, *units = self.block
        x = upsample(activation(x), state)
        for unit in units:
            x = unit(x, state)
        return x
