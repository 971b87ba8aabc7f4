"""Random weights under which the codec behaves like a trained one: unit-scale signals inside, audible sound outside."""

import torch
from torch import Tensor, nn

from deployments.codec.decoder import DecoderNetwork
from deployments.codec.encoder import EncoderNetwork
from deployments.codec.layers import CausalConv1d, CausalConvTranspose1d
from deployments.codec.state import stack

_CALIBRATION_FRAMES = 8
_WAVEFORM_STD = 0.15  # audible, far from clipping
_RESIDUAL_STD = 0.35  # a residual unit adds a fraction of its input's scale


def randomize_codec(decoder: DecoderNetwork, encoder: EncoderNetwork, *, generator: torch.Generator) -> None:
    """Fill both networks in place; their parameters must be materialised, on the generator's device.

    Plain initialisation would leave codebooks empty, residual branches silent and the waveform vanishing or clipped.
    Here every convolution of the decoder is scaled by the output it really has, so that waveforms can be compared.
    """
    with torch.no_grad():
        _fill(decoder, generator)
        _fill(encoder, generator)
        _scale_convolutions(decoder, generator)


def randomize_decoder(decoder: DecoderNetwork, *, generator: torch.Generator) -> None:
    """As randomize_codec, of a decoder alone."""
    with torch.no_grad():
        _fill(decoder, generator)
        _scale_convolutions(decoder, generator)


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
            tensor.fill_(1)  # norms
        case _:
            raise ValueError(f"no rule for {name}")


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
    decoder.prepare()
    decoder(codes, stack([decoder.layout.initial(device=generator.device, dtype=torch.float32)]))
    for handle in handles:
        handle.remove()
