"""Checkpoints that others made from a released one, given by their folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deployments.errors import CheckpointError
from deployments.protocol import ModelKind
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from deployments.weights.store import locate
from tests.deployments.talker.conftest import CONFIG
from tests.deployments.talker.driving import ask, speak

WEIGHTS = "model.safetensors"
ROW = 3000  # where the official recipe puts the voice it has learned


def said(engine: Engine, voice: str) -> list[list[int]]:
    codes: list[list[int]] = speak(engine, ask(frames=5, ignore_eos=True, voice=voice)).codes.tolist()
    return codes


def made(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: Any) -> Path:
    """A copy of checkpoint `source` with other tensors, and with other keys in its config.json."""
    for file in (path for path in source.rglob("*") if path.is_file()):
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    save_file(change(load_file(source / WEIGHTS)), folder / WEIGHTS)
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    talker = values["talker_config"] | config.pop("talker_config", {})
    (folder / "config.json").write_text(json.dumps(values | config | {"talker_config": talker}), encoding="utf-8")
    return folder


def test_a_voice_by_the_official_recipe(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """A base checkpoint becomes one voice: its speaker encoder's section stays in config.json, its tensors do not."""
    base = tiny_checkpoint("Base")
    size = json.loads((base / "config.json").read_text(encoding="utf-8"))["talker_config"]["vocab_size"]
    row = min(ROW, size - 1)

    def learn(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("speaker_encoder")}
        kept["talker.model.codec_embedding.weight"][row] = torch.linspace(
            -1, 1, kept["talker.model.codec_embedding.weight"].shape[1]
        )
        return kept

    speaker = {"spk_id": {"Ada": row}, "spk_is_dialect": {"Ada": False}}
    made(base, tmp_path, learn, tts_model_type="custom_voice", talker_config=speaker)
    engine = build_engine(locate(str(tmp_path)), CONFIG)
    assert (engine.info.kind, engine.info.voices) == (ModelKind.CUSTOM_VOICE, ("ada",))
    assert len(said(engine, "ada")) == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_another_type(dtype: torch.dtype, tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source, rounded = tiny_checkpoint("CustomVoice"), tmp_path / "rounded"
    made(source, tmp_path / "stored", lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    made(source, rounded, lambda tensors: {name: each.to(dtype).float() for name, each in tensors.items()})
    stored, wanted = build_engine(locate(str(tmp_path / "stored")), CONFIG), build_engine(rounded, CONFIG)
    voice = stored.info.voices[0]
    assert said(stored, voice) == said(wanted, voice)


def test_a_merged_adapter_is_plain_tensors(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """As PEFT's merge_and_unload leaves it: W + B A where the adapter was, and every name as before."""
    source, name = tiny_checkpoint("CustomVoice"), "talker.model.layers.0.mlp.down_proj.weight"
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")  # often left beside it

    def merge(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        rows, columns = tensors[name].shape
        down, up = torch.linspace(-1, 1, 2 * columns).view(2, columns), torch.linspace(-1, 1, rows * 2).view(rows, 2)
        return tensors | {name: tensors[name] + up @ down}

    merged, plain = build_engine(locate(str(made(source, tmp_path, merge))), CONFIG), build_engine(source, CONFIG)
    voice = plain.info.voices[0]
    assert len(said(merged, voice)) == 5
    assert said(merged, voice) != said(plain, voice)


def test_an_adapter_that_is_not_merged_is_named(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    def wrap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "talker.model.layers.0.self_attn.q_proj"
        rest = {key: tensor for key, tensor in tensors.items() if key != f"{name}.weight"}
        lora = {f"{name}.lora_A.default.weight": torch.zeros(2, 4), f"{name}.lora_B.default.weight": torch.zeros(4, 2)}
        return rest | lora | {f"{name}.base_layer.weight": tensors[f"{name}.weight"]}

    made(tiny_checkpoint("CustomVoice"), tmp_path, wrap)
    with pytest.raises(CheckpointError, match=r"LoRA adapter .* merge") as error:
        build_engine(locate(str(tmp_path)), CONFIG)
    assert "\n" not in str(error.value)
