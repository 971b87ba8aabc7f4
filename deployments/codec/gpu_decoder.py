"""The decoder on a GPU: streams live in slots of static tensors, and a call runs over any of them.

Nothing depends on the host but the list of slots, so a call can be captured. `slots` may hold the scratch slot, any
number of times, to fill a batch up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
import triton
from torch import Tensor

from deployments.codec import kernels
from deployments.codec.decoder import PCM_SCALE, DecoderNetwork
from deployments.codec.folding import Conv, ConvNeXt, FoldedDecoder, Layer, Linear, Wave, fold, map_tensors

MAX_FRAMES = 12  # of one stream in one call
_MIN_DOT = 16
_TILES = ((128, 128), (128, 64), (64, 64), (32, 32))
_ENOUGH_BLOCKS = 100  # of an H200's 132 multiprocessors
_LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class _Remembered:
    """Where the slots' last input rows of a layer are: a view [slots, context, channels]."""

    rows: Tensor
    silence: Tensor  # [channels]


class GpuDecoder:
    """Weights and slots of the decoder. Calls are issued on the current CUDA stream and do not synchronise."""

    def __init__(
        self, network: DecoderNetwork, *, num_slots: int, code_ring: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """`code_ring` is how many frames' codes a slot holds.

        `dtype` is that of products and activations; sums are float32. Float32 products use TF32.
        """
        self.device, self.dtype = torch.device(device), dtype
        self.folded = _place(fold(network), self.device, dtype)
        self.config = config = network.config
        self.frame_samples = config.frame_samples
        self.shared_bytes = _shared_bytes(self.device)  # of a multiprocessor, for one block
        self.scratch_slot = num_slots
        self._ring = 1 << (config.sliding_window - 1 + MAX_FRAMES - 1).bit_length()
        self._remembered = self._allocate(num_slots + 1)
        heads, size = config.num_key_value_heads, config.head_dim
        shape = (num_slots + 1, 2, heads, self._ring, size)
        self._caches = [torch.zeros(shape, device=device, dtype=dtype) for _ in self.folded.layers]
        self.positions = torch.zeros(num_slots + 1, device=device, dtype=torch.int32)
        self.codes = torch.zeros(
            (num_slots + 1, code_ring, config.num_quantizers), device=device, dtype=torch.int16
        )  # frame p of a slot at p % code_ring

    @torch.inference_mode()
    def reset(self, slot: int) -> None:
        """Begin a new stream in a slot."""
        self._flat[slot].copy_(self._silence)
        self.positions[slot].zero_()

    @torch.inference_mode()
    def decode(self, slots: Tensor, frames: int) -> Tensor:
        """The next `frames` frames of the streams in `slots` [B] int32, whose codes are there: int16 [B, samples]."""
        batch = len(slots)
        call = _Call(self, slots, batch)
        pcm = call.run(frames)
        self.positions.index_add_(0, slots, torch.full_like(slots, frames))
        return pcm.view(batch, frames * self.frame_samples)

    def _allocate(self, num_slots: int) -> dict[int, _Remembered]:
        """One row of memory for each slot, so that a reset is one copy; views of it by the id of the layer."""
        wanted: list[tuple[int, int, Tensor]] = []
        folded = self.folded
        for conv in _remembering(folded):
            if isinstance(conv, Conv):
                wanted.append((id(conv), conv.context, conv.silence))
            else:
                taps, channels = conv.taps.shape
                wanted.append((id(conv), taps - 1, torch.zeros(channels, device=self.device)))
        silences = [silence.to(self.dtype).expand(context, -1).flatten() for _, context, silence in wanted]
        padded = [torch.nn.functional.pad(silence, (0, -len(silence) % 64)) for silence in silences]
        self._silence = torch.cat(padded)
        self._flat = self._silence.repeat(num_slots, 1)
        views, start = {}, 0
        for (key, context, silence), flat, pad in zip(wanted, silences, padded, strict=True):
            view = self._flat[:, start : start + len(flat)].view(num_slots, context, -1)
            views[key] = _Remembered(view, silence)
            start += len(pad)
        return views


class _Call:
    """One pass over a batch. Rows are [B * time, channels] throughout."""

    def __init__(self, decoder: GpuDecoder, slots: Tensor, batch: int) -> None:
        self.decoder, self.slots, self.batch = decoder, slots, batch
        self.config, self.folded = decoder.config, decoder.folded

    def run(self, frames: int) -> Tensor:
        folded, config = self.folded, self.config
        x = self._embed(frames)
        x, _ = self._conv(x, folded.pre_conv, frames)
        x = self._linear(x, folded.input_proj)
        for layer, cache in zip(folded.layers, self.decoder._caches, strict=True):
            x = self._layer(x, layer, cache, frames)
        x = self._linear(x, folded.output_proj, norm=True)
        time = frames
        for upsample, convnext in folded.stages:
            x, _ = self._conv(x, upsample, time)
            time *= upsample.upsampling
            x = self._convnext(x, convnext, time)
        _, wave = self._conv(x, folded.first_conv, time, wave=folded.blocks[0].wave, plain=False)
        for index, block in enumerate(folded.blocks):
            after = folded.blocks[index + 1].wave if index + 1 < len(folded.blocks) else folded.last_wave
            waves = [unit.first for unit in block.units] + [after]
            x, wave = self._conv(wave, block.upsample, time, wave=waves[0])
            time *= block.upsample.upsampling
            for unit, following in zip(block.units, waves[1:], strict=True):
                _, inner = self._conv(wave, unit.dilated, time, wave=unit.second, plain=False)
                x, wave = self._conv(
                    inner, unit.pointwise, time, wave=following, residual=x, plain=following is not after
                )
        assert time == frames * config.frame_samples, (time, frames)
        return self._waveform(wave, folded.last_conv, time)

    def _empty(self, rows: int, channels: int) -> Tensor:
        return torch.empty((rows, channels), device=self.decoder.device, dtype=self.decoder.dtype)

    def _embed(self, frames: int) -> Tensor:
        decoder, tables = self.decoder, self.folded.tables
        channels, groups = tables.shape[1], self.config.num_quantizers
        y = self._empty(self.batch * frames, channels)
        block = min(256, _power(channels))
        kernels.embed_kernel[(len(y), -(-channels // block))](
            decoder.codes, self.slots, decoder.positions, tables, y,
            frames, decoder.codes.shape[1], self.config.codebook_size, channels, GROUPS=groups, BLOCK=block,
        )  # fmt: skip
        return y

    def _layer(self, x: Tensor, layer: Layer, cache: Tensor, frames: int) -> Tensor:
        config, decoder = self.config, self.decoder
        qkv = self._linear(x, layer.qkv, norm=True)
        heads, size = config.num_attention_heads, config.head_dim
        y = self._empty(len(x), heads * size)
        kernels.attention_kernel[(self.batch, heads)](
            qkv, cache, self.slots, decoder.positions, y, frames, log(config.rope_theta),
            HEADS=heads, KV_HEADS=config.num_key_value_heads, SIZE=size, WINDOW=config.sliding_window,
            RING=decoder._ring, FRAMES=_MIN_DOT,
        )  # fmt: skip
        x = self._linear(y, layer.output, residual=x)
        h = self._linear(x, layer.up, norm=True, gate=layer.gate)
        return self._linear(h, layer.down, residual=x)

    def _convnext(self, x: Tensor, block: ConvNeXt, time: int) -> Tensor:
        memory = self.decoder._remembered[id(block)].rows
        normed = torch.empty_like(x)
        channels, taps = x.shape[1], len(block.taps)
        kernels.depthwise_norm_kernel[(len(x),)](
            x, memory, self.slots, block.taps, block.bias, normed, time, channels, memory.stride(0), _LAYER_NORM_EPS,
            TAPS=taps, BLOCK=_power(channels),
        )  # fmt: skip
        self._remember(x, memory, time)
        return self._linear(self._linear(normed, block.up, gelu=True), block.down, residual=x)

    def _waveform(self, x: Tensor, conv: Conv, time: int) -> Tensor:
        memory = self.decoder._remembered[id(conv)].rows
        pcm = torch.empty(len(x), device=x.device, dtype=torch.int16)
        rows, channels = 32, x.shape[1]
        kernels.waveform_kernel[(-(-len(x) // rows),)](
            x, memory, self.slots, conv.weight, conv.bias, pcm, len(x), time, channels, memory.stride(0),
            float(PCM_SCALE),
            TAPS=len(conv.weight), ROWS=rows, BLOCK=_power(channels),
        )  # fmt: skip
        self._remember(x, memory, time)
        return pcm

    def _remember(self, x: Tensor, memory: Tensor, time: int) -> None:
        _, context, channels = memory.shape
        rows, block = _power(context), min(64, _power(channels))
        kernels.remember_kernel[(self.batch, -(-channels // block))](
            x, memory, self.slots, time, context, channels, memory.stride(0), ROWS=rows, BLOCK=block
        )

    def _linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: bool = False,
        gate: Linear | None = None,
        gelu: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        gates = None if gate is None else gate.weight
        step = _Step(linear.weight[None], linear.bias, gates, residual=residual, norm=norm, gelu=gelu)
        return self._multiply(x, step, time=len(x))[0]

    def _conv(
        self,
        x: Tensor,
        conv: Conv,
        time: int,
        *,
        wave: Wave | None = None,
        residual: Tensor | None = None,
        plain: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Plain output and output behind `wave`, [B * time * upsampling, channels]; one not asked for is x."""
        memory = self.decoder._remembered[id(conv)].rows if conv.context else None
        step = _Step(
            conv.weight, conv.bias, residual=residual, wave=wave, memory=memory, dilation=conv.dilation, plain=plain
        )
        y, waved = self._multiply(x, step, time=time)
        if memory is not None:
            self._remember(x, memory, time)
        channels = conv.weight.shape[2] // conv.upsampling
        return y.view(-1, channels) if plain else y, waved if wave is None else waved.view(-1, channels)

    def _multiply(self, x: Tensor, step: "_Step", *, time: int) -> tuple[Tensor, Tensor]:
        """Plain output and output behind the wave, each [rows, outs]; one not asked for is x."""
        taps, num_in, num_out = step.weight.shape
        y = self._empty(len(x), num_out) if step.plain else x
        waved = x if step.wave is None else self._empty(len(x), num_out)
        tiles = choose_tiles(
            len(x),
            num_in,
            num_out,
            value_bytes=x.element_size(),
            weights=1 if step.gate is None else 2,
            shared_bytes=self.decoder.shared_bytes,
        )
        unused = step.weight
        kernels.conv_kernel[(-(-len(x) // tiles["BLOCK_M"]), -(-num_out // tiles["BLOCK_N"]))](
            x,
            x if step.memory is None else step.memory,
            self.slots,
            step.weight,
            unused if step.gate is None else step.gate,
            unused if step.bias is None else step.bias,
            x if step.residual is None else step.residual,
            y,
            waved,
            unused if step.wave is None else step.wave.double,
            unused if step.wave is None else step.wave.half,
            len(x),
            time,
            num_in,
            num_out,
            num_out if step.wave is None else len(step.wave.half),
            step.dilation,
            0 if step.memory is None else step.memory.stride(0),
            self.config.rms_norm_eps,
            TAPS=taps,
            NORM=step.norm,
            GATED=step.gate is not None,
            BIAS=step.bias is not None,
            GELU=step.gelu,
            RESIDUAL=step.residual is not None,
            PLAIN=step.plain,
            WAVE=step.wave is not None,
            **tiles,
        )
        return y, waved


@dataclass(frozen=True, slots=True)
class _Step:
    """What one launch computes, as `conv_kernel` describes it."""

    weight: Tensor  # [taps, in, out]
    bias: Tensor | None
    gate: Tensor | None = None  # as weight
    residual: Tensor | None = None
    wave: Wave | None = None
    memory: Tensor | None = None
    dilation: int = 1
    norm: bool = False
    gelu: bool = False
    plain: bool = True


def choose_tiles(
    num_rows: int, num_in: int, num_out: int, *, value_bytes: int, weights: int, shared_bytes: int
) -> dict[str, int]:
    """Tile sizes and launch options of a product [num_rows, taps * num_in] x [.., num_out].

    The largest tile that still occupies the GPU; where none does, small ones with long steps, bound by latency. Few
    kinds of tiles, since each is compiled for each kind of layer. `weights` matrices share the rows.
    """
    fitting = [
        (block_m, block_n)
        for block_m, block_n in _TILES
        if block_m <= num_rows and -(-num_rows // block_m) * -(-num_out // block_n) >= _ENOUGH_BLOCKS
    ]
    block_m, block_n = fitting[0] if fitting else (_MIN_DOT, 32) if num_rows <= _MIN_DOT else (32, 32)
    longest = (128 if block_m <= 32 else 64) * 2 // value_bytes
    block_k = next(size for size in (128, 64, 32, 16) if size <= longest and num_in % size == 0)
    stage_bytes = (block_m + weights * block_n) * block_k * value_bytes
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "num_warps": 8 if block_m * block_n > 128 * 64 else 4,
        "num_stages": min(4, max(2, shared_bytes // stage_bytes)),
    }


def _shared_bytes(device: torch.device) -> int:
    if device.type == "cpu":  # interpreted
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _remembering(folded: FoldedDecoder) -> Sequence[Conv | ConvNeXt]:
    """The layers that remember rows."""
    convs: list[Conv | ConvNeXt] = [folded.pre_conv, folded.first_conv, folded.last_conv]
    convs += [convnext for _, convnext in folded.stages]
    for block in folded.blocks:
        convs += [block.upsample, *(unit.dilated for unit in block.units)]
    return convs


def _place(folded: FoldedDecoder, device: torch.device, dtype: torch.dtype) -> FoldedDecoder:
    """Matrices of products in `dtype`, everything that is added or scaled by in float32."""
    return map_tensors(
        folded,
        lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() and tensor.dim() > 1 else tensor.dtype),
    )


def _power(value: int) -> int:
    """The next power of two."""
    return 1 << (value - 1).bit_length()
