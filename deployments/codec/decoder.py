"""The codec decoder: frames of codes become samples, any number of frames at a time, many streams in one call."""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deployments.checkpoint import load_strict, without_values
from deployments.codec.chunking import REPLAY_SIZES, call_sizes, replay_sizes
from deployments.codec.config import DecoderConfig, SpeechTokenizerConfig
from deployments.codec.cpu_decoder import CpuNetwork
from deployments.codec.folding import fold
from deployments.codec.layers import CausalConv1d, CausalConvTranspose1d, ConvNeXtBlock, Snake, UpsamplingBlock
from deployments.codec.quantizer import SplitQuantizer
from deployments.codec.state import BatchState, DecoderState, StateLayout, split, stack
from deployments.codec.transformer import Transformer
from deployments.errors import EngineError

# Frames that reach into a latent besides the transformer's windows, through the convolution before it.
_PRE_CONV_FRAMES = 2
# What a faster precision may cost: its error this far below the signal is not heard.
MIN_SNR_DB = 35.0
PCM_SCALE = 32767  # libsndfile's for 16 bits, through which the official package's users write their files


class DecoderNetwork(nn.Module):
    """The decoder's layers under the checkpoint's names ("decoder." left off). `prepare` before the first call."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layout = layout = StateLayout()
        self.quantizer = SplitQuantizer(config)
        self.pre_conv = CausalConv1d(layout, config.codebook_dim, config.latent_dim, kernel_size=3)
        self.pre_transformer = Transformer(layout, config)
        self.upsample = nn.ModuleList(_upsampling_stage(layout, config, ratio) for ratio in config.upsampling_ratios)
        self.decoder = nn.ModuleList(_waveform_stages(layout, config))

    def prepare(self) -> None:
        """Compute what follows from the loaded parameters: folded codebooks and snake terms."""
        self.quantizer.prepare()
        for module in self.modules():
            if isinstance(module, Snake):
                module.prepare()

    def forward(self, codes: Tensor, state: BatchState) -> Tensor:
        """Samples [B, frames * frame_samples] within [-1, 1]; leaves the streams' next state in `state`."""
        return self.synthesize(self.quantizer(codes), state).clamp(-1, 1)

    def synthesize(self, x: Tensor, state: BatchState) -> Tensor:
        """Unbounded samples [B, frames * frame_samples] of quantized latents [B, frames, codebook_dim]."""
        return self._waveform(self._latents(x, state), state)

    def decode(self, codes: Tensor, states: Sequence[DecoderState]) -> tuple[Tensor, list[DecoderState]]:
        """Samples [B, frames * frame_samples] within [-1, 1], and the next states of the streams."""
        batch = stack(states)
        audio = self(codes, batch)
        return audio, split(batch, [state.position + codes.shape[1] for state in states])

    def advance(self, codes: Tensor, states: Sequence[DecoderState], *, followed_by: int = 0) -> list[DecoderState]:
        """The states that `decode` would return, or what counts of them before another `followed_by` frames."""
        batch, heard = stack(states), self.config.convolved_frames
        x = self._latents(self.quantizer(codes), batch)
        if followed_by < heard:
            self._waveform(x[:, :, -heard:], batch)
        return split(batch, [state.position + codes.shape[1] for state in states])

    def _latents(self, x: Tensor, state: BatchState) -> Tensor:  # [B, frames, codebook_dim] -> [B, latent_dim, frames]
        x = self.pre_conv(x.transpose(1, 2), state)
        latents: Tensor = self.pre_transformer(x.transpose(1, 2), state).transpose(1, 2)
        return latents

    def _waveform(self, x: Tensor, state: BatchState) -> Tensor:
        for stage in self.upsample:
            for layer in stage.children():
                x = layer(x, state)
        for layer in self.decoder:
            x = layer(x) if isinstance(layer, Snake) else layer(x, state)
        return x.squeeze(1)


def _upsampling_stage(layout: StateLayout, config: DecoderConfig, ratio: int) -> nn.ModuleList:
    channels = config.latent_dim
    upsample = CausalConvTranspose1d(layout, channels, channels, kernel_size=ratio, stride=ratio)
    return nn.ModuleList([upsample, ConvNeXtBlock(layout, channels)])


def _waveform_stages(layout: StateLayout, config: DecoderConfig) -> list[nn.Module]:
    stages: list[nn.Module] = [CausalConv1d(layout, config.latent_dim, config.decoder_dim, kernel_size=7)]
    channels = config.decoder_dim
    for stride in config.upsample_rates:
        stages.append(UpsamplingBlock(layout, channels, channels // 2, stride=stride))
        channels //= 2
    return [*stages, Snake(channels), CausalConv1d(layout, channels, 1, kernel_size=7)]


class CodecDecoder:
    """A loaded decoder. It takes its network over, and several threads may call it: states go in and come back."""

    def __init__(
        self, network: DecoderNetwork, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        """On a CPU `dtype` is that of matrix products alone; elsewhere it is that of everything."""
        network.prepare()  # in the precision of the parameters, before they are rounded
        self.config = network.config
        self.device = torch.device(device)
        self._network: DecoderNetwork | CpuNetwork
        if self.device.type == "cpu":
            self._network = rows = CpuNetwork(fold(network.to(device)), dtype=dtype)
            self._initial_state = rows.initial_state()
        else:
            self._network = network.to(device=device, dtype=dtype).requires_grad_(requires_grad=False).eval()
            self._initial_state = network.layout.initial(device=device, dtype=dtype)

    @classmethod
    def load(cls, directory: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Self:
        """Load from `directory`, the checkpoint's `speech_tokenizer` folder. Raises CheckpointError."""
        config = SpeechTokenizerConfig.load(directory)
        with without_values():
            network = DecoderNetwork(config.decoder)
        load_strict(network, directory, prefix="decoder.", dtype=torch.float32, device=device)
        return cls(network, device=device, dtype=dtype)

    @property
    def frame_samples(self) -> int:
        """Samples of one frame."""
        return self.config.frame_samples

    @property
    def reach(self) -> int:
        """Frames back that may still be heard in the next sample."""
        config = self.config
        in_transformer = config.num_hidden_layers * (config.sliding_window - 1)
        return in_transformer + _PRE_CONV_FRAMES + config.convolved_frames

    def initial_state(self) -> DecoderState:
        """State of a stream before its first frame. States are immutable, so streams share this one."""
        return self._initial_state

    @torch.inference_mode()
    def decode(self, codes: Tensor, states: Sequence[DecoderState]) -> tuple[Tensor, list[DecoderState]]:
        """Decode the next frames of each stream.

        `codes` is [B, frames, num_code_groups] int64, one row per state. Returns float32 samples within [-1, 1],
        [B, frames * frame_samples], and the streams' next states. Memory grows with B * frames. Raises EngineError for
        codes that are in no codebook.
        """
        self._check(codes, len(states))
        audio, behind = self._network.decode(codes.to(self.device), states)
        return audio.float(), behind

    def recall(self, codes: Tensor) -> DecoderState:
        """State of a stream behind its frames so far, `codes` [frames, num_code_groups] int64, without their audio.

        Costs what the frames within reach of the next sample cost in the transformer, and a dozen in the convolutions.
        """
        codes, state = codes[-self.reach :], self._initial_state
        for size in replay_sizes(len(codes), call_sizes(REPLAY_SIZES)):
            left = codes[size:]
            (state,) = self.advance(codes[None, :size], [state], followed_by=len(left))
            codes = left
        return state

    @torch.inference_mode()
    def advance(self, codes: Tensor, states: Sequence[DecoderState], *, followed_by: int = 0) -> list[DecoderState]:
        """The states that `decode` would return, for less: only the last frames are made audio of.

        Not even those where `advance` is called again for another `followed_by` frames that reach further than the
        convolutions do: what a state then holds of them is as it was before.
        """
        self._check(codes, len(states))
        return self._network.advance(codes.to(self.device), states, followed_by=followed_by)

    def _check(self, codes: Tensor, num_streams: int) -> None:
        assert codes.dim() == 3, codes.shape
        assert codes.shape[0] == num_streams, (codes.shape, num_streams)
        assert codes.shape[1] > 0, codes.shape
        if codes.shape[2] != self.config.num_quantizers:
            raise EngineError(f"a frame has {codes.shape[2]} codes, the codec takes {self.config.num_quantizers}")
        lowest, highest = (int(bound) for bound in codes.aminmax())
        if lowest < 0 or highest >= self.config.codebook_size:
            raise EngineError(f"codes {lowest} to {highest} are not within 0 to {self.config.codebook_size - 1}")


def to_pcm16(audio: Tensor) -> NDArray[np.int16]:
    """Samples within [-1, 1] as int16, rounded to nearest and clipped at full scale."""
    scaled = (audio.float() * PCM_SCALE).round().clamp(-PCM_SCALE - 1, PCM_SCALE)
    return scaled.to(torch.int16).cpu().numpy()


def snr_db(exact: Tensor, other: Tensor) -> float:
    """Power of the signal over that of the error; minus infinity where `other` is not finite."""
    error = (other.double() - exact.double()).square().sum()
    ratio = 10 * torch.log10(exact.double().square().sum() / error)
    return float(ratio) if bool(torch.isfinite(error)) else -inf
