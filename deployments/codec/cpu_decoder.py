"""The decoder's arithmetic on a CPU: every layer is one oneDNN convolution over rows of channels, weights packed once.

In bfloat16 only the products are: what is added up, the snakes, the last convolution and attention stay in float32.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from deployments.codec.folding import Conv, ConvNeXt, FoldedDecoder, Layer, Linear, Wave
from deployments.codec.state import BatchState, DecoderState
from deployments.codec.transformer import rotary_tables, rotate, window_mask

_LAYER_NORM_EPS = 1e-6
_TYPICAL_ROWS = 128
_MANY_CHANNELS = 512
_BLOCK = 1 << 16  # values that the steps of a snake take together: they stay in the second-level cache


class Product:
    """A convolution [B, context + time, in] -> [B, time, out] with its weight in oneDNN's own order.

    Layers of many channels have few rows: they are multiplied as matrices, over rows that were copied tap by tap. The
    others are convolutions to oneDNN, which needs no copies but has no fast way for fewer rows than context.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dilation: int, dtype: torch.dtype) -> None:
        """`weight` is [taps, in, out]."""
        self._taps, channels, _ = weight.shape
        self._dilation, self._context, self._dtype = dilation, (self._taps - 1) * dilation, dtype
        self._bias = None if bias is None else bias.to(dtype)
        self._is_matrix = channels >= _MANY_CHANNELS
        self._packs = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._weight = self._pack(weight.to(dtype))

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` must be contiguous."""
        rows = rows.to(self._dtype)
        return self._multiply(rows) if self._is_matrix else self._convolve(rows)

    def _pack(self, weight: Tensor) -> Tensor:
        if self._is_matrix:
            matrix = weight.permute(2, 0, 1).flatten(1).contiguous()
            return torch.ops.mkldnn._reorder_linear_weight(matrix, _TYPICAL_ROWS) if self._packs else matrix
        kernel = weight.permute(2, 1, 0).unsqueeze(2).contiguous()
        if not self._packs:
            return kernel
        size = [1, kernel.shape[1], 1, _TYPICAL_ROWS + self._context]
        stride, padding = [1, 1], [0, 0]
        packed: Tensor = torch._C._nn.mkldnn_reorder_conv2d_weight(  # type: ignore[call-arg]
            kernel.to_mkldnn(), padding, stride, [1, self._dilation], 1, size
        )
        return packed

    def _multiply(self, rows: Tensor) -> Tensor:
        rows = self._unfolded(rows) if self._taps > 1 else rows
        if not self._packs:
            return F.linear(rows, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out

    def _convolve(self, rows: Tensor) -> Tensor:
        image = rows.transpose(1, 2).unsqueeze(2)
        if not self._packs:
            out = F.conv2d(image, self._weight, self._bias, dilation=(1, self._dilation))
        else:
            out = torch.ops.mkldnn._convolution_pointwise(
                image, self._weight, self._bias, [0, 0], [1, 1], [1, self._dilation], 1, "none", [], ""
            )
        return out.squeeze(2).transpose(1, 2)

    def _unfolded(self, rows: Tensor) -> Tensor:
        """What each output row is a product of, [B, time, taps * in]."""
        batch, length, channels = rows.shape
        shape = (batch, length - self._context, self._taps, channels)
        strides = (length * channels, channels, self._dilation * channels, 1)
        return rows.as_strided(shape, strides).flatten(2)


class _Convolution:
    """A product behind remembered rows, which are slot `index` of a stream's state."""

    def __init__(self, conv: Conv, index: int, dtype: torch.dtype) -> None:
        self.product = Product(conv.weight, conv.bias, conv.dilation, dtype)
        self.context, self.upsampling, self.index, self.dtype = conv.context, conv.upsampling, index, dtype

    def __call__(self, x: Tensor, state: BatchState, wave: Wave | None = None) -> Tensor:
        """[B, time, in] -> [B, time * upsampling, out], of x behind `wave`."""
        batch, time, channels = x.shape
        rows = torch.empty((batch, self.context + time, channels), dtype=self.dtype)
        if self.context:
            rows[:, : self.context] = state.tensors[self.index]
        _apply(wave, x, rows[:, self.context :])
        if self.context:
            state.tensors[self.index] = rows[:, time:].clone()
        y = self.product(rows)
        return y.reshape(batch, time * self.upsampling, -1)


def _apply(wave: Wave | None, x: Tensor, out: Tensor) -> None:
    """Fill `out` [B, time, channels] with x behind the snake."""
    if wave is None:
        out.copy_(x)
        return
    step = max(1, _BLOCK // x.shape[2])
    for stream, target in zip(x, out, strict=True):
        for start in range(0, len(stream), step):
            part = stream[start : start + step].float()
            target[start : start + step] = torch.addcmul(part, (part * wave.double).cos_(), wave.half, value=-1)


class CpuNetwork:
    """Folded weights, packed. Called as DecoderNetwork is."""

    def __init__(self, folded: FoldedDecoder, *, dtype: torch.dtype) -> None:
        """`dtype` is that of the products: float32 or bfloat16."""
        self.config, self.dtype = folded.config, dtype
        self._folded = folded
        self._initial: list[Tensor] = []
        # The whole signal goes through these projections: rounding is heard most there, and exactness costs least.
        self._pre_conv = self._convolution(folded.pre_conv, torch.float32)
        self._input_proj = self._linear(folded.input_proj, torch.float32)
        self._layers = [_TransformerLayer(self, layer) for layer in folded.layers]
        self._output_proj = self._linear(folded.output_proj, torch.float32)
        self._stages = [
            (self._convolution(up, torch.float32), _ConvNeXtLayer(self, block)) for up, block in folded.stages
        ]
        self._first = self._convolution(folded.first_conv)
        self._blocks = [
            (
                block.wave,
                self._convolution(block.upsample),
                [
                    (unit.first, self._convolution(unit.dilated), unit.second, self._convolution(unit.pointwise))
                    for unit in block.units
                ],
            )
            for block in folded.blocks
        ]
        self._last = self._convolution(folded.last_conv, torch.float32)

    def initial_state(self) -> DecoderState:
        """State of a stream before its first frame."""
        return DecoderState(0, tuple(self._initial))

    def __call__(self, codes: Tensor, state: BatchState) -> Tensor:
        """As DecoderNetwork.forward."""
        return self._waveform(self._latents(codes, state), state).clamp(-1, 1)

    def recall(self, codes: Tensor, state: BatchState) -> None:
        """As DecoderNetwork.recall."""
        self._waveform(self._latents(codes, state)[:, -self.config.convolved_frames :], state)

    def _latents(self, codes: Tensor, state: BatchState) -> Tensor:
        """[B, frames, latent_dim]."""
        folded, config = self._folded, self.config
        x = F.embedding(codes + folded.offsets, folded.tables).sum(dim=2)
        x = self._input_proj(self._pre_conv(x, state)).float()
        positions, frames = state.positions, codes.shape[1]
        mask = window_mask(positions, frames, window=config.sliding_window)
        numbers = positions[:, None] + torch.arange(frames)
        rotary = rotary_tables(numbers, head_dim=config.head_dim, theta=config.rope_theta, dtype=torch.float32)
        for layer in self._layers:
            x = layer(x, state, mask=mask, rotary=rotary)
        return self._output_proj(_normed(x, config.rms_norm_eps))

    def _waveform(self, x: Tensor, state: BatchState) -> Tensor:
        """Samples [B, time]."""
        for upsample, block in self._stages:
            x = block(upsample(x, state), state)
        x = self._first(x, state)
        for wave, upsample, units in self._blocks:
            x = upsample(x, state, wave).float()
            for first, dilated, second, pointwise in units:
                x += pointwise(dilated(x, state, first), state, second)
        return self._last(x, state, self._folded.last_wave).squeeze(2)

    def remember(self, initial: Tensor) -> int:
        """Reserve a tensor of the streams' states; its index."""
        self._initial.append(initial)
        return len(self._initial) - 1

    def _convolution(self, conv: Conv, dtype: torch.dtype | None = None) -> _Convolution:
        dtype = dtype or self.dtype
        silence = conv.silence.to(dtype).repeat(conv.context, 1)
        return _Convolution(conv, self.remember(silence) if conv.context else -1, dtype)

    def _linear(self, linear: Linear, dtype: torch.dtype | None = None) -> Product:
        return Product(linear.weight[None], linear.bias, 1, dtype or self.dtype)


class _TransformerLayer:
    def __init__(self, network: CpuNetwork, layer: Layer) -> None:
        config = network.config
        self.config = config
        self.qkv, self.output, self.down = map(network._linear, (layer.qkv, layer.output, layer.down))
        self.gate_up = Product(torch.cat((layer.gate.weight, layer.up.weight), dim=1)[None], None, 1, network.dtype)
        self.history = config.sliding_window - 1
        heads, size = config.num_key_value_heads, config.head_dim
        self.index = network.remember(torch.zeros(2, heads, self.history, size))

    def __call__(self, x: Tensor, state: BatchState, *, mask: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        config, eps = self.config, self.config.rms_norm_eps
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = self.qkv(_normed(x, eps)).float()
        qkv = qkv.view(*qkv.shape[:2], -1, config.head_dim).transpose(1, 2)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        q, new = rotate(q, rotary), torch.stack((rotate(k, rotary), v), dim=1)
        known = torch.cat((state.tensors[self.index], new), dim=3)  # [B, 2, heads, history + frames, size]
        state.tensors[self.index] = known[:, :, :, -self.history :]
        y = F.scaled_dot_product_attention(q, known[:, 0], known[:, 1], attn_mask=mask, enable_gqa=heads != kv_heads)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(_normed(x, eps)).float().chunk(2, dim=2)
        return x + self.down(F.silu(gate) * up)


class _ConvNeXtLayer:
    def __init__(self, network: CpuNetwork, block: ConvNeXt) -> None:
        self.block = block
        self.up, self.down = network._linear(block.up), network._linear(block.down)
        taps, channels = block.taps.shape
        self.index = network.remember(torch.zeros(taps - 1, channels))

    def __call__(self, x: Tensor, state: BatchState) -> Tensor:
        x = x.float()
        taps = self.block.taps
        rows = torch.cat((state.tensors[self.index], x), dim=1)
        time = x.shape[1]
        state.tensors[self.index] = rows[:, time:].clone()
        y = self.block.bias + sum(rows[:, tap : tap + time] * weight for tap, weight in enumerate(taps))
        y = F.layer_norm(y, y.shape[2:], eps=_LAYER_NORM_EPS)
        out: Tensor = x + self.down(F.gelu(self.up(y).float()))
        return out


def _normed(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square; the norm's weight is folded away."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
