import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deployments.errors import CheckpointError
from deployments.weights.checkpoint import load_strict, read_shapes, read_tensors
from deployments.weights.description import cloning_fingerprint

TENSORS = {"part.weight": torch.arange(6.0).view(2, 3), "part.bias": torch.ones(2), "other.part.weight": torch.zeros(4)}


def write_single(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors")


def write_shards(directory: Path, tensors: dict[str, Tensor]) -> None:
    weight_map = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors)}
    for name, file in weight_map.items():
        save_file({name: tensors[name]}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(directory: Path, *, ignore: tuple[str, ...] = (), dtype: torch.dtype = torch.float32) -> nn.Linear:
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    load_strict(module, directory, prefix="part.", dtype=dtype, device="cpu", ignore=ignore)
    return module


@pytest.mark.parametrize("write", [write_single, write_shards])
def test_a_meta_module_is_filled(tmp_path: Path, write: type) -> None:
    write(tmp_path, TENSORS)
    module = load(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(module.weight, TENSORS["part.weight"].bfloat16())
    assert torch.equal(module.bias, TENSORS["part.bias"].bfloat16())
    assert not module.weight.requires_grad


def test_only_the_prefix_is_read(tmp_path: Path) -> None:
    write_shards(tmp_path, TENSORS)
    (tmp_path / "model-2.safetensors").unlink()  # the shard of "other.part.weight"
    assert read_shapes(tmp_path, "part.") == {"weight": (2, 3), "bias": (2,)}
    assert read_tensors(tmp_path, "part.").keys() == {"weight", "bias"}
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors"):
        read_tensors(tmp_path)


def test_ignored_names_may_be_missing_or_unexpected(tmp_path: Path) -> None:
    write_single(tmp_path, {"part.weight": TENSORS["part.weight"], "part.extra": torch.ones(1)})
    module = load(tmp_path, ignore=("bias", "ex*"))
    assert torch.equal(module.weight, TENSORS["part.weight"])
    assert module.bias.is_meta


def test_the_fingerprint_is_of_what_reads_recordings(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Another speaker encoder gives other vectors, another tokenizer other codes; a copy gives the same."""
    base = tiny_checkpoint("Base")
    fingerprint = cloning_fingerprint(base)
    copy = shutil.copytree(base, tmp_path / "copy")
    assert cloning_fingerprint(copy) == fingerprint
    for file, name in ((copy / "model.safetensors", "speaker_encoder."), (copy / "speech_tokenizer", "")):
        path = file if file.is_file() else next(file.glob("*.safetensors"))
        tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
        changed = next(key for key in sorted(tensors) if key.startswith(name) and tensors[key].is_floating_point())
        save_file({**tensors, changed: tensors[changed] + 1}, path, {"format": "pt"})
        assert cloning_fingerprint(copy) != fingerprint
        fingerprint = cloning_fingerprint(copy)
