"""Give random weights the properties of trained weights: norms far from 1, outliers, sharp attention and near-ties.

Norms and activations are scaled by powers of two, and the next layer by their reciprocals. Powers of two are exact in
every dtype, so the network's function does not change.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

_NORM_EXPONENT = 6  # exponent of two: norm weights of 1/64 to 64
_HUGE = 1024.0  # one hidden activation in this many is multiplied by this factor
_HUGE_SHARE = 256
_SHARP = 2.0  # factor for the length of queries and keys
_TIE = 1e-3  # difference between the logits of two tied codes
_TWINS = 2048  # number of codes to tie; control ids follow the codes


def stress_networks(tensors: Tensors, generator: torch.Generator) -> None:
    """Modify the tensors of a talker or codec decoder in place. Keys are the names in a checkpoint."""
    for name in sorted(tensors):
        prefix, _, last = name.rpartition("input_layernorm.weight")
        if not last and prefix:
            _stress_layer(tensors, prefix, generator)
        if name.endswith(("code_predictor.model.norm.weight", "pre_transformer.norm.weight")):
            _scale([tensors[name]], _behind_final_norm(tensors, name), generator)
        if name.endswith(".norm.bias"):  # in a ConvNeXt block
            block = name.removesuffix("norm.bias")
            norm = [tensors[f"{block}norm.weight"], tensors[name]]
            _scale(norm, [tensors[f"{block}pwconv1.weight"]], generator)
        if name.endswith("codec_head.weight") or ".lm_head." in name:
            _tie(tensors[name], generator)


def _stress_layer(tensors: Tensors, prefix: str, generator: torch.Generator) -> None:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    queries = [tensors[f"{attention}{part}_proj.weight"] for part in "qkv"]
    _scale([tensors[f"{prefix}input_layernorm.weight"]], queries, generator)
    gates = [tensors[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")]
    _scale([tensors[f"{prefix}post_attention_layernorm.weight"]], gates, generator)
    up, down = gates[1], tensors[f"{mlp}down_proj.weight"]
    factors = _powers(len(up), 3, generator)
    factors[torch.randperm(len(up), generator=generator)[: max(1, len(up) // _HUGE_SHARE)]] = _HUGE
    up *= factors[:, None].to(up.dtype)
    down /= factors.to(down.dtype)
    for part in "qk":
        norm = tensors.get(f"{attention}{part}_norm.weight")
        (tensors[f"{attention}{part}_proj.weight"] if norm is None else norm).mul_(_SHARP)


def _behind_final_norm(tensors: Tensors, name: str) -> list[Tensor]:
    if name.endswith("pre_transformer.norm.weight"):
        return [tensors[name.replace("norm.weight", "output_proj.weight")]]
    return [tensor for other, tensor in tensors.items() if ".lm_head." in other]


def _scale(norm: list[Tensor], following: Iterable[Tensor], generator: torch.Generator) -> None:
    factors = _powers(len(norm[0]), _NORM_EXPONENT, generator)
    for values in norm:
        values *= factors.to(values.dtype)
    for weight in following:
        weight /= factors.to(weight.dtype)


def _powers(count: int, exponent: int, generator: torch.Generator) -> Tensor:
    return 2.0 ** torch.randint(-exponent, exponent + 1, (count,), generator=generator)


def _tie(head: Tensor, generator: torch.Generator) -> None:
    """Copy the weights of each even code to the next code, with a few values one bfloat16 step larger."""
    codes = head[: min(_TWINS, len(head))]
    step = float(codes.float().std()) * 2**-8
    moved = torch.rand(codes[::2].shape, generator=generator) < (_TIE / step) ** 2 / codes.shape[1]
    codes[1::2] = codes[::2] * (1 + moved.to(codes.dtype) * 2**-7)
