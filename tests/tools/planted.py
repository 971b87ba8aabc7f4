"""A checkpoint with random weights and one attention head that follows the text."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from deployments.talker.model.layers import rotate

LAYER, HEAD = 0, 1
_LAG = 3  # positions, for text that comes beside the frames
_LOUD, _SHARP = 50.0, 8.0


def plant(source: Path, directory: Path, layer: int = LAYER, head: int = HEAD, lag: int = _LAG) -> Path:
    """Copy a tiny checkpoint, and give its `head` of `layer` queries and keys that differ in their rotation
    only: it reads what stands `lag` positions before. One channel is the same in all rows, because each has text.
    """
    shutil.copytree(source, directory)
    talker = json.loads((directory / "config.json").read_text())["talker_config"]
    size = talker["head_dim"]
    tensors = load_file(directory / "model.safetensors")
    bias = tensors["talker.text_projection.linear_fc2.bias"]
    bias[0] = _LOUD
    attention = f"talker.model.layers.{layer}.self_attn"
    frequencies = talker["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
    back = -lag * torch.cat((frequencies, frequencies))
    key, group = torch.ones(size), talker["num_attention_heads"] // talker["num_key_value_heads"]
    query = rotate(key, (back.cos(), back.sin()))
    for name, number, value in (("q_proj", head, query), ("k_proj", head // group, key)):
        rows = tensors[f"{attention}.{name}.weight"][number * size : (number + 1) * size]
        rows.zero_()
        rows[:, 0] = value
    tensors[f"{attention}.q_norm.weight"].fill_(_SHARP)
    tensors[f"{attention}.k_norm.weight"].fill_(1.0)
    save_file(tensors, directory / "model.safetensors")
    return directory
