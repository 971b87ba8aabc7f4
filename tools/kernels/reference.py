"""Reference implementations of the talker's kernels in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from deployments.talker.kernels.matmul import Product
from deployments.talker.kernels.qkv import HeadNorms, Heads
from deployments.talker.model.layers import attend_rows, rotate
from deployments.talker.sampling.torch_sampler import NoiseKey, apply_repetition_penalty, sample
from deployments.talker.sampling.triton_sampler import FirstCodeRules
from deployments.talker.state.batch_state import BatchOptions, Context


def reference_matmul(x: Tensor, weight: Tensor, product: Product, *, bias: Tensor | None = None,
                     residual: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return the result of `matmul`, in the precision of its arguments."""
    if product.eps is not None:
        x = F.rms_norm(x, x.shape[-1:], eps=product.eps)
    out = x @ weight.T
    if product.gated:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    if bias is not None:
        out = out + bias
    return out if residual is None else out + residual


def reference_qkv(qkv: Tensor, norms: HeadNorms, heads: Heads, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalised and rotated queries and keys, and values, [rows, heads, head_dim] each."""
    rows = qkv.shape[0]
    split = qkv.view(rows, -1, heads.dim).split((heads.query, heads.key, heads.key), dim=1)
    cos, sin = (table[positions].to(qkv.dtype).repeat(1, 2)[:, None] for table in (norms.cos, norms.sin))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (heads.dim,), weight.to(x.dtype), norms.eps)

    query, key = norm(split[0], norms.query), norm(split[1], norms.key)
    return rotate(query, (cos, sin)), rotate(key, (cos, sin)), split[2]


def reference_attend_frame(qkv: Tensor, norms: HeadNorms, heads: Heads, caches: tuple[Tensor, Tensor],
                           position: int) -> Tensor:  # fmt: skip
    """Return the output of `attend_frame`, and write the caches like `attend_frame`."""
    positions = torch.full((qkv.shape[0],), position, device=qkv.device)
    query, key, value = reference_qkv(qkv, norms, heads, positions)
    keys, values = caches
    keys[:, :, position], values[:, :, position] = key, value
    past = slice(None, position + 1)
    return attend_rows(query, keys[:, :, past], values[:, :, past], None).flatten(1)


def reference_attend_paged(qkv: Tensor, norms: HeadNorms, heads: Heads, caches: tuple[Tensor, Tensor],
                           context: Context, block_size: int) -> Tensor:  # fmt: skip
    """Return the output of `TritonAttention`, and write the caches like `TritonAttention`."""
    query, key, value = reference_qkv(qkv, norms, heads, context.positions.long())
    keys, values = caches
    keys[context.slot_mapping], values[context.slot_mapping] = key, value
    attended = []
    for row, length in enumerate(context.lengths.tolist()):
        positions = torch.arange(length, device=qkv.device)
        slots = context.block_tables[row, positions // block_size].long() * block_size + positions % block_size
        own_keys, own_values = (tensor[slots].transpose(0, 1)[None] for tensor in (keys, values))
        attended.append(attend_rows(query[row : row + 1], own_keys, own_values, None))
    return torch.cat(attended).flatten(1)


def reference_attend_prompt(queries: Tensor, caches: tuple[Tensor, Tensor], context: Context,
                            owners: Tensor) -> Tensor:  # fmt: skip
    rows, own = len(queries), (owners[:, None] == owners) & (context.positions <= context.positions[:, None])
    keys, values = (cache[context.slot_mapping].transpose(0, 1).expand(rows, -1, -1, -1) for cache in caches)
    return attend_rows(queries, keys, values, own[:, None, None]).flatten(1)


def reference_first_code(logits: Tensor, options: BatchOptions, noise_key: NoiseKey, rules: FirstCodeRules) -> Tensor:
    """Return the codes [rows] that `sample_first_code` must choose. Does not modify `rules.seen`."""
    values = apply_repetition_penalty(logits.float(), rules.seen[rules.state_rows], rules.penalty)
    values = values.masked_fill(rules.suppressed, -torch.inf)
    too_early = (noise_key.frames < rules.min_new_tokens) | rules.ignore_eos
    values[:, rules.eos] = values[:, rules.eos].masked_fill(too_early, -torch.inf)
    return sample(values, options, noise_key)
