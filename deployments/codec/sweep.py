"""Every code of every codebook through the decoder as the checkpoint has it, and what became largest on the way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isfinite
from typing import Self

import torch
from torch import Tensor, nn

from deployments.codec.config import DecoderConfig
from deployments.codec.decoder import to_pcm16
from deployments.codec.reference import DecoderNetwork

_FRAMES = 64  # of a stream
_BATCH = 4  # streams at once: bounds memory


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest number that a layer takes or gives."""

    value: float
    layer: str

    def __str__(self) -> str:
        if not isfinite(self.value):
            return f"{self.layer} comes to NaN or infinity in float32: the weights are broken"
        return f"the largest activation is {self.value:.4g}, at {self.layer} (float16 ends at 65,504)"


@dataclass(frozen=True, slots=True)
class Sweep:
    """Streams that hold every code, and random ones, in float32."""

    codes: Tensor  # [streams, frames, groups] int64, on the host
    audio: Tensor  # int16 [streams, samples], on the host
    largest: Largest

    @classmethod
    @torch.inference_mode()
    def of(cls, network: DecoderNetwork, progress: Callable[[int, int], None] = lambda done, total: None) -> Self:
        """Decode them with `network`, on its device. `progress` hears of streams that are done."""
        codes, audio, largest = every_code(network.config), [], Largest(0.0, "none")
        device = next(network.parameters()).device
        with _observed(network) as found:
            for streams in torch.split(codes, _BATCH):
                audio.append(torch.from_numpy(to_pcm16(network(streams.to(device)))))
                progress(sum(map(len, audio)), len(codes))
        for layer, value in found.items():
            if not value <= largest.value:  # NaN is not below anything
                largest = Largest(value if isfinite(value) else inf, layer)
            if not isfinite(largest.value):
                break
        return cls(codes, torch.cat(audio), largest)


def every_code(config: DecoderConfig) -> Tensor:
    """[streams, frames, groups]: in all but the last stream each code stands once in each codebook; that is random."""
    frames = min(_FRAMES, config.codebook_size)
    groups = torch.arange(config.num_quantizers)
    count = -(-config.codebook_size // frames) * frames
    codes = (torch.arange(count)[:, None] + 131 * groups) % config.codebook_size  # others meet in each frame
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(config.codebook_size, (frames, config.num_quantizers), generator=generator)
    return torch.cat((codes, random)).view(-1, frames, config.num_quantizers)


@contextmanager
def _observed(network: nn.Module) -> Iterator[dict[str, float]]:
    """The largest number that each layer takes or gives while this lasts, NaN where one is; by name, in their order."""
    found: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def note(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            numbers = [tensor for tensor in (*inputs, output) if tensor.is_floating_point()]
            most = torch.stack([torch.linalg.vector_norm(tensor, inf) for tensor in numbers]).max()
            found[name] = max(float(most), found.get(name, 0.0), key=lambda value: (value != value, value))

        return note

    layers = ((name, module) for name, module in network.named_modules() if not list(module.children()))
    handles = [module.register_forward_hook(watch(name)) for name, module in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
