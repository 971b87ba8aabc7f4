"""Forward pass of the decoder in Triton kernels. Streams have slots in static tensors, and a call can read any slot.

Only the list of slots comes from the host, so calls can be captured. `slots` may be padded with several copies of the
scratch slot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deployments.codec.backends import triton_kernels
from deployments.codec.codec_config import DecoderConfig
from deployments.codec.decoder import PCM_SCALE
from deployments.codec.decoder_state import DecoderState
from deployments.codec.fold import Block, Conv, ConvNeXt, FoldedWeights, Layer, Linear, Snake, map_tensors
from deployments.codec.forward import ForwardPass, Signal, latents, waveform
from deployments.gpu.launch import is_hopper, shared_bytes

_MIN_DOT = 16
# Rows and columns of each tile, largest first.
_TILES = ((128, 128), (128, 64), (64, 64), (32, 32), (32, 16))
_COPIED_TILES = ((128, 128), (128, 64), (64, 128), (64, 64), (32, 32), (16, 32))
_MOST_ROWS = 1.25  # rows in all of a tile's blocks, as a multiple of the actual rows
_ENOUGH_BLOCKS = 90  # an H200 has 132 multiprocessors
_MANY_BLOCKS = 640  # several per multiprocessor; it is then faster to run two smaller thread blocks at once
_SHORT_CALL_FRAMES = 16
_LAYER_NORM_EPS = 1e-6


class TritonDecoder:
    """Weights and slots of the decoder. Calls are enqueued on the current CUDA stream and do not synchronize."""

    def __init__(
        self,
        folded: FoldedWeights,
        *,
        num_slots: int,
        code_ring: int,
        device: torch.device | str,
        dtype: torch.dtype,
        products: str = "tf32",
    ) -> None:
        """Allocate slots that each hold the codes of `code_ring` frames.

        Products and activations use `dtype`; sums use float32. `products` is Triton's method for float32 products:
        "tf32" truncates the digits that float16 rounds, and "tf32x3" keeps almost all digits.
        """
        self.device, self.dtype, self.products = torch.device(device), dtype, products
        self.folded = _place(folded, self.device, dtype)
        self.config = config = folded.config
        self.frame_samples = config.frame_samples
        self.shared_bytes = shared_bytes(self.device)  # available to one block
        self.launches_early = self.copies_tiles = is_hopper(self.device)
        self.scratch_slot = num_slots
        self.ring = config.cached_frames
        self.memories = self._allocate(num_slots + 1)
        heads, size = config.num_key_value_heads, config.head_dim
        shape = (num_slots + 1, 2, heads, self.ring, size)
        self.caches = {layer: torch.zeros(shape, device=device, dtype=dtype) for layer in self.folded.layers}
        self.positions = torch.zeros(num_slots + 1, device=device, dtype=torch.int32)
        self.room = max(layer.context for layer in self.folded.remembering)  # rows before the first row of a call
        # Frame p of a slot is stored at p % code_ring.
        self.codes = torch.zeros((num_slots + 1, code_ring, config.num_quantizers), device=device, dtype=torch.int16)

    @torch.inference_mode()
    def reset(self, slot: int) -> None:
        self._flat[slot].zero_()
        self.positions[slot].zero_()

    @torch.inference_mode()
    def state(self, slot: int, position: int) -> DecoderState:
        """Return a copy of a slot's state after `position` frames."""
        return DecoderState(position, tuple(tensor.clone() for tensor in self._remembered(slot)))

    @torch.inference_mode()
    def resume(self, slot: int, state: DecoderState) -> None:
        """Continue in `slot` from another slot's state."""
        torch._foreach_copy_(self._remembered(slot), list(state.tensors))
        self.positions[slot].fill_(state.position)

    def _remembered(self, slot: int) -> list[Tensor]:
        return [self._flat[slot], *(cache[slot] for cache in self.caches.values())]

    @torch.inference_mode()
    def decode(self, slots: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """Decode the next `frames` frames of the streams in `slots` [B] int32, which contain the codes.

        Returns int16 [B, samples], and int32 [B] with 1 for a stream that reached NaN or infinity. That stream's
        slot keeps the invalid values.
        """
        call = _TritonPass(self, slots, frames)
        pcm = waveform(call, self.folded, latents(call, self.folded))
        self.positions.index_add_(0, slots, torch.full_like(slots, frames))
        return pcm.view(len(slots), frames * self.frame_samples), call.broken

    @torch.inference_mode()
    def recall(self, slots: Tensor, frames: int) -> None:
        """Update the transformer's state as `decode` does, without the convolutions and their memory."""
        latents(_TritonPass(self, slots, frames), self.folded)
        self.positions.index_add_(0, slots, torch.full_like(slots, frames))

    def _allocate(self, num_slots: int) -> dict[Conv | ConvNeXt, Tensor]:
        """Allocate one row of memory per slot, so that a reset takes one call.

        Returns views of the memory by layer: the last input rows in each slot, [slots, context, channels].
        """
        layers = list(self.folded.remembering)
        sizes = [layer.context * layer.channels for layer in layers]
        starts = [0, *accumulate(-(-size // 64) * 64 for size in sizes)]
        self._flat = torch.zeros((num_slots, starts[-1]), device=self.device, dtype=self.dtype)
        return {
            layer: self._flat[:, start : start + size].view(num_slots, layer.context, layer.channels)
            for layer, start, size in zip(layers, starts, sizes, strict=False)
        }


class _TritonPass(ForwardPass):
    """One forward pass over the streams in `slots`. All rows are [B, time, channels], with room for earlier rows."""

    def __init__(self, decoder: TritonDecoder, slots: Tensor, frames: int) -> None:
        self.decoder, self.slots, self.frames, self.batch = decoder, slots, frames, len(slots)
        self.config: DecoderConfig = decoder.config
        self.broken = torch.zeros_like(slots)
        # Launches limit short calls. In long calls, blocks waiting for a predecessor would occupy multiprocessors.
        pdl = decoder.launches_early and self.batch * frames <= _SHORT_CALL_FRAMES
        self._launch = {"pdl": pdl, "launch_pdl": pdl}

    def _empty(self, time: int, channels: int) -> Tensor:
        """Allocate [B, time, channels], preceded by room for the largest context of any layer."""
        room = self.decoder.room
        shape = (self.batch, room + time, channels)
        return torch.empty(shape, device=self.decoder.device, dtype=self.decoder.dtype)[:, room:]

    def embed(self) -> Signal:
        decoder, tables = self.decoder, self.decoder.folded.tables
        channels, groups = tables.shape[1], self.config.num_quantizers
        y = self._empty(self.frames, channels)
        block = min(256, _power(channels))
        triton_kernels.embed_kernel[(self.batch * self.frames, -(-channels // block))](
            decoder.codes, self.slots, decoder.positions, tables, y, self.frames, decoder.codes.shape[1],
            self.config.codebook_size, channels, y.stride(0), groups=groups, block=block, **self._launch,
        )  # fmt: skip
        return Signal(y)

    def linear(self, x: Signal, linear: Linear, *, norm: bool = False, gate: Linear | None = None, gelu: bool = False,
               residual: Signal | None = None) -> Signal:  # fmt: skip
        gates = None if gate is None else gate.weight
        added = None if residual is None else residual.values
        step = _Launch(linear.weight[None], linear.bias, gates, residual=added, norm=norm, gelu=gelu)
        return self._multiply(x.values, step)

    def attend(self, qkv: Signal, layer: Layer) -> Signal:
        config, decoder = self.config, self.decoder
        heads, size = config.num_attention_heads, config.head_dim
        y = self._empty(self.frames, heads * size)
        triton_kernels.attention_kernel[(self.batch, heads)](
            qkv.values, decoder.caches[layer], self.slots, decoder.positions, y, self.frames, qkv.values.stride(0),
            y.stride(0), log(config.rope_theta), heads=heads, kv_heads=config.num_key_value_heads, size=size,
            window=config.sliding_window, ring=decoder.ring, block_frames=_MIN_DOT, precision=decoder.products,
            **self._launch,
        )  # fmt: skip
        return Signal(y)

    def depthwise_norm(self, x: Signal, block: ConvNeXt) -> Signal:
        rows = self._with_context(x.values, block)
        _, time, channels = x.values.shape
        normed = self._empty(time, channels)
        triton_kernels.depthwise_norm_kernel[(self.batch * time,)](
            rows, block.taps, block.bias, normed, time, channels, rows.stride(0), normed.stride(0), _LAYER_NORM_EPS,
            taps=len(block.taps), block=_power(channels), **self._launch,
        )  # fmt: skip
        return Signal(normed)

    def conv(
        self, x: Signal, conv: Conv, *, snake: Snake | None = None, residual: Signal | None = None, plain: bool = True
    ) -> Signal:
        """Convolve, and apply the next layer's snake while the results are still in registers."""
        rows = self._with_context(x.values if x.snaked is None else x.snaked, conv)
        added = None if residual is None else residual.values
        step = _Launch(
            conv.weight, conv.bias, residual=added, snake=snake, dilation=conv.dilation, upsampling=conv.upsampling,
            plain=plain,
        )  # fmt: skip
        return self._multiply(rows, step)

    def samples(self, x: Signal, conv: Conv) -> Tensor:
        """Convolve to int16 samples."""
        assert x.snaked is not None
        rows = self._with_context(x.snaked, conv)
        _, time, channels = x.snaked.shape
        pcm = torch.empty(self.batch * time, device=rows.device, dtype=torch.int16)
        size = 32
        triton_kernels.waveform_kernel[(-(-len(pcm) // size),)](
            rows, conv.weight, conv.bias, pcm, self.broken, len(pcm), time, channels, rows.stride(0), float(PCM_SCALE),
            taps=len(conv.weight), block_rows=size, block=_power(channels), **self._launch,
        )  # fmt: skip
        return pcm

    def pieces(self, x: Signal, block: Block) -> Iterator[tuple["_TritonPass", Signal]]:
        yield self, x

    def _with_context(self, x: Tensor, layer: Conv | ConvNeXt) -> Tensor:
        """Return x preceded by the layer's remembered rows, [B, context + time, channels], and store its last rows."""
        if not layer.context:
            return x
        batch, time, channels = x.shape
        memory, stride = self.decoder.memories[layer], x.stride(0)
        start = x.storage_offset() - layer.context * channels
        rows = x.as_strided((batch, layer.context + time, channels), x.stride(), start)
        context, block = _power(layer.context), min(64, _power(channels))
        triton_kernels.remember_kernel[(batch, -(-channels // block))](
            rows, memory, self.slots, time, layer.context, channels, stride, memory.stride(0), block_rows=context,
            block=block, **self._launch,
        )  # fmt: skip
        return rows

    def _multiply(self, x: Tensor, step: "_Launch") -> Signal:
        """Return the output [B, time * upsampling, channels], and the output after the snake, if any.

        x is [B, context + time, in]. If the step is not `plain`, the returned values are x, which later layers ignore.
        """
        taps, num_in, num_out = step.weight.shape
        time = x.shape[1] - (taps - 1) * step.dilation
        shape = (time * step.upsampling, num_out // step.upsampling)
        y = self._empty(*shape) if step.plain else x
        snaked = x if step.snake is None else self._empty(*shape)
        out_stride = snaked.stride(0) if step.snake is not None else y.stride(0)
        assert step.residual is None or step.residual.stride(0) == out_stride
        tiles = choose_tiles(
            Rows(self.batch, time),
            num_in,
            num_out,
            value_bytes=x.element_size(),
            weights=1 if step.gate is None else 2,
            shared_bytes=self.decoder.shared_bytes,
            copies=self.decoder.copies_tiles and not step.norm,
        )
        block_m, block_n, block_k = tiles["block_m"], tiles["block_n"], tiles["block_k"]
        if tiles["copied"]:
            source = TensorDescriptor(x, list(x.shape), list(x.stride()), [1, block_m, block_k])
            matrix = step.weight.view(taps * num_in, num_out)
            weight = TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [block_k, block_n])
            blocks = self.batch * -(-time // block_m)
        else:
            source, weight, blocks = x, step.weight, -(-self.batch * time // block_m)
        unused = step.weight
        snake, bias = step.snake, unused if step.bias is None else step.bias
        triton_kernels.conv_kernel[(-(-num_out // block_n), blocks)](
            source, weight, unused if step.gate is None else step.gate, bias,
            x if step.residual is None else step.residual, y, snaked,
            unused if snake is None else snake.frequency, unused if snake is None else snake.amplitude,
            self.batch, time, num_in, num_out, num_out if snake is None else len(snake.amplitude),
            step.dilation, x.stride(0), out_stride, self.config.rms_norm_eps,
            taps=taps, norm=step.norm, gated=step.gate is not None, bias=step.bias is not None, gelu=step.gelu,
            residual=step.residual is not None, plain=step.plain, snaked=snake is not None,
            precision=self.decoder.products, **self._launch, **tiles,
        )  # fmt: skip
        return Signal(y, snaked=None if snake is None else snaked)


@dataclass(frozen=True, slots=True)
class _Launch:
    """Arguments of one launch of `conv_kernel`, which documents them."""

    weight: Tensor  # [taps, in, out]
    bias: Tensor | None
    gate: Tensor | None = None  # shaped like `weight`
    residual: Tensor | None = None
    snake: Snake | None = None
    dilation: int = 1
    upsampling: int = 1
    norm: bool = False
    gelu: bool = False
    plain: bool = True


class Rows(NamedTuple):
    """Output rows of a product."""

    streams: int
    time: int  # of each stream


def choose_tiles(
    rows: Rows, num_in: int, num_out: int, *, value_bytes: int, weights: int, shared_bytes: int, copies: bool = False
) -> dict[str, int]:
    """Return tile sizes and launch options for a product [rows, taps * num_in] x [.., num_out].

    Selects the largest tile that still fills the GPU and pads no more columns than a narrower tile. If none does,
    selects small tiles with long steps, which are limited by latency. Choices are few, because Triton compiles each
    tile for each kind of layer. `weights` is the number of matrices that share the rows. With `copies`, the copy engine
    may read the tiles. The rows of a copied tile belong to one stream, so the tile may be smaller. It is faster down to
    a quarter of the other tile's size.
    """
    num_rows = rows.streams * rows.time
    block_m, block_n = _largest_tile(_TILES, num_rows, 1, num_out)
    copied = copies and value_bytes == 2 and rows.time >= _MIN_DOT
    if copied:
        tile = _largest_tile(_COPIED_TILES, rows.time, rows.streams, num_out)
        copied = 4 * tile[0] * tile[1] >= block_m * block_n
        block_m, block_n = tile if copied else (block_m, block_n)
    longest = (128 if block_m <= 32 else 64) * 2 // value_bytes
    block_k = next(size for size in (128, 64, 32, 16) if size <= longest and num_in % size == 0)
    stage_bytes = (block_m + weights * block_n) * block_k * value_bytes
    if copied:  # two blocks share a multiprocessor
        warps, stages = 4, min(5, shared_bytes // 2 // stage_bytes)
    else:
        blocks = -(-num_rows // block_m) * -(-num_out // block_n)
        has_many = blocks >= _MANY_BLOCKS and value_bytes == 2 and weights == 1
        warps = 8 if block_m * block_n > 128 * 64 and not has_many else 4
        stages = min(6 if block_m <= 32 else 3 if has_many else 4, shared_bytes // stage_bytes)
    return {
        "copied": copied,
        "block_m": block_m,
        "block_n": block_n,
        "block_k": block_k,
        "num_warps": warps,
        "num_stages": max(2, stages),
    }


def _largest_tile(tiles: Sequence[tuple[int, int]], num_rows: int, parts: int, num_out: int) -> tuple[int, int]:
    """Return the first tile that fills the GPU with little padding, or the last. It covers rows of one of `parts`."""

    def blocks(block_m: int, block_n: int) -> int:
        return parts * -(-num_rows // block_m) * -(-num_out // block_n)

    small = _power(max(_MIN_DOT, num_rows))
    for block_m, block_n in tiles:
        if (
            (block_m <= 32 or -(-num_rows // block_m) * block_m <= _MOST_ROWS * num_rows)
            and blocks(block_m, block_n) >= _ENOUGH_BLOCKS
            and (block_n < 128 or 2 * blocks(block_m, block_n) == blocks(block_m, block_n // 2))
        ):
            return min(block_m, small), block_n
    block_m, block_n = tiles[-1]
    return min(block_m, small), block_n


def _place(folded: FoldedWeights, device: torch.device, dtype: torch.dtype) -> FoldedWeights:
    """Move weights to `device`: matrices of products in `dtype`, summands and factors in float32."""
    return map_tensors(
        folded,
        lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() and tensor.dim() > 1 else tensor.dtype),
    )


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()
