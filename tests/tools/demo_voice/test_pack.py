from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deployments.embedded_voice.checkpoint import unpack
from tools.demo_voice.export import pack


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(64, 96, generator=generator) * torch.logspace(-3, 2, 64)[:, None],
        "convolution": torch.randn(32, 64, 7, generator=generator),
        "scale": torch.randn(64, generator=generator),
        "small": torch.randn(8, 8, generator=generator),
        "encoder.matrix": torch.randn(64, 96, generator=generator),
    }


@pytest.fixture
def checkpoint(tensors: dict[str, Tensor], tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    (directory / "speech_tokenizer").mkdir(parents=True)
    (directory / "config.json").write_text("{}", encoding="utf-8")
    save_file(tensors, directory / "model.safetensors")
    save_file(tensors, directory / "speech_tokenizer" / "model.safetensors")
    return directory


def files(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def unpacked(checkpoint: Path, *, without: str = "") -> Path:
    root = checkpoint.parent
    pack(checkpoint, root / "packed", without=without)
    unpack([root / "packed"], root / "unpacked")
    return root / "unpacked"


def test_an_unpacked_checkpoint_has_the_same_files(checkpoint: Path) -> None:
    assert files(unpacked(checkpoint)).keys() == files(checkpoint).keys()


@pytest.mark.parametrize("name", ["matrix", "convolution"])
def test_every_value_is_within_half_a_step_of_its_row(checkpoint: Path, tensors: dict[str, Tensor], name: str) -> None:
    restored = load_file(unpacked(checkpoint) / "model.safetensors")[name]
    assert restored.dtype == torch.float16
    rows = tensors[name].flatten(1)
    step = rows.abs().amax(1, keepdim=True) / 127
    assert ((restored.float().flatten(1) - rows).abs() <= 0.5 * step + rows.abs() * 2**-10).all()


@pytest.mark.parametrize("name", ["scale", "small"])
def test_small_tensors_are_only_rounded(checkpoint: Path, tensors: dict[str, Tensor], name: str) -> None:
    restored = load_file(unpacked(checkpoint) / "speech_tokenizer" / "model.safetensors")[name]
    assert torch.equal(restored, tensors[name].half())


def test_rows_of_zeros_stay_zero(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    save_file({"table": torch.zeros(64, 64)}, tmp_path / "checkpoint" / "model.safetensors")
    restored = load_file(unpacked(tmp_path / "checkpoint") / "model.safetensors")["table"]
    assert torch.equal(restored, torch.zeros(64, 64, dtype=torch.float16))


def test_what_serving_does_not_need_is_left_out(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    restored = load_file(unpacked(checkpoint, without="encoder.") / "model.safetensors")
    assert restored.keys() == tensors.keys() - {"encoder.matrix"}


def test_packing_and_unpacking_are_the_same_every_time(checkpoint: Path, tmp_path: Path) -> None:
    pack(checkpoint, tmp_path / "one")
    pack(checkpoint, tmp_path / "two")
    assert files(tmp_path / "one") == files(tmp_path / "two")
    unpack([tmp_path / "one"], tmp_path / "first")
    unpack([tmp_path / "one"], tmp_path / "second")
    assert files(tmp_path / "first") == files(tmp_path / "second")


def test_a_packed_checkpoint_is_a_quarter_of_float32(checkpoint: Path, tmp_path: Path) -> None:
    pack(checkpoint, tmp_path / "packed")
    sizes = [sum(map(len, files(directory).values())) for directory in (checkpoint, tmp_path / "packed")]
    assert sizes[1] < 0.27 * sizes[0]
