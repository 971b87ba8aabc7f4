"""Random codec weights that behave like trained weights, with unit-scale signals and audible output."""

from enum import StrEnum

import torch
from torch import Tensor, nn

from deployments.codec.encoder import EncoderNetwork
from talkray_tools.unfolded_codec import CausalConv1d, CausalConvTranspose1d, DecoderNetwork, UnfoldedSnake

_CALIBRATION_FRAMES = 8
_WAVEFORM_STD = 0.15  # audible, far from clipping
# Standard deviations of the snakes' log parameters, in a published vocoder, and the widest that tests use.
_TRAINED, _WIDE, _WIDE_SLOPE = 0.47, 1.5, 0.47
_OUTLIERS = 1000  # one channel in this many, but at least one per layer
_HALF_AMPLITUDES = (20.0, 5000.0)
_RESIDUAL_STD = 0.35  # scale of a residual branch relative to its input


class Stress(StrEnum):
    """Snake parameters as numerically demanding as trained ones."""

    OUTLIERS = "outliers"  # deviation 0.47; one channel in a thousand has half amplitudes of 20 to 5,000
    WIDE = "wide"  # deviation 1.5 throughout


def randomize_codec(
    decoder: DecoderNetwork, encoder: EncoderNetwork | None, *, generator: torch.Generator, stress: Stress | None = None
) -> None:
    """Fill both networks in place, or only the decoder. Parameters must be materialised on the generator's device.

    Plain initialisation leaves codebooks empty and residual branches silent, and waveforms vanish or clip. Every
    decoder convolution is therefore scaled according to its actual output, so that waveforms can be compared.
    """
    with torch.no_grad():
        _fill(decoder, generator)
        if encoder is not None:
            _fill(encoder, generator)
        _stress_snakes(decoder, stress, generator)
        _scale_convolutions(decoder, generator)


def randomize_decoder(decoder: DecoderNetwork, *, generator: torch.Generator) -> None:
    randomize_codec(decoder, None, generator=generator)


def _fill(network: nn.Module, generator: torch.Generator) -> None:
    for name, tensor in network.state_dict().items():
        _fill_tensor(name, tensor, generator)


def _fill_tensor(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    match name.rsplit(".", 1)[-1]:
        case "embedding_sum" | "embed_sum":
            tensor.normal_(0, 1, generator=generator)
        case "cluster_usage":
            tensor.uniform_(0.5, 2.0, generator=generator)
        case "gamma":
            tensor.uniform_(0.2, 0.5, generator=generator)
        case "scale":
            tensor.uniform_(0.1, 0.3, generator=generator)
        case "alpha" | "beta":
            tensor.normal_(0, 0.2, generator=generator)
        case "bias":
            tensor.normal_(0, 0.05, generator=generator)
        case "initialized":
            tensor.fill_(1)
        case "weight" if tensor.dim() >= 2:
            tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)
        case "weight":
            tensor.fill_(1)  # norm weights
        case _:
            raise ValueError(f"no rule for {name}")


def _stress_snakes(decoder: DecoderNetwork, stress: Stress | None, generator: torch.Generator) -> None:
    """Draw new frequencies and amplitudes.

    Amplitude depends on frequency, so that slopes are as steep as in trained weights. Independent draws with deviation
    1.5 give consecutive slopes of 100. Two float32 passes with different summation orders then have an SNR of 0.1 dB.
    """
    for snake in (module for module in decoder.modules() if isinstance(module, UnfoldedSnake)):
        if stress is Stress.WIDE:
            snake.alpha.normal_(0, _WIDE, generator=generator)
            snake.beta.normal_(0, _WIDE_SLOPE, generator=generator).add_(snake.alpha)
        if stress is Stress.OUTLIERS:
            snake.alpha.normal_(0, _TRAINED, generator=generator)
            snake.beta.normal_(0, _TRAINED, generator=generator)
            chosen = torch.rand(len(snake.beta), generator=generator) < 1 / _OUTLIERS
            chosen[0] = True  # at least one outlier, even in narrow layers
            share, tie = torch.rand((2, int(chosen.sum())), generator=generator)
            low, high = _HALF_AMPLITUDES
            half = low * (high / low) ** share
            snake.beta[chosen] = -(2 * half).log()
            snake.alpha[chosen] = snake.beta[chosen] * (0.5 + tie / 2)  # from x + x^2 up to x + frequency x^2


def _scale_convolutions(decoder: DecoderNetwork, generator: torch.Generator) -> None:
    targets: dict[nn.Module, float] = {
        module: _RESIDUAL_STD if name.endswith("conv2") else 1.0
        for name, module in decoder.named_modules()
        if isinstance(module, CausalConv1d | CausalConvTranspose1d)
    }
    targets[decoder.decoder[-1]] = _WAVEFORM_STD

    def scale(module: nn.Module, _inputs: tuple[object, ...], output: Tensor) -> Tensor:
        factor = targets[module] / output.std().clamp(min=1e-8)
        for parameter in module.parameters():
            parameter.mul_(factor)
        return output * factor

    handles = [module.register_forward_hook(scale) for module in targets]
    config = decoder.config
    shape = (1, _CALIBRATION_FRAMES, config.num_quantizers)
    codes = torch.randint(config.codebook_size, shape, generator=generator, device=generator.device)
    decoder(codes)
    for handle in handles:
        handle.remove()
