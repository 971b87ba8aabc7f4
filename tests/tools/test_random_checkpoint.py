import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Tokenizer

from deployments.errors import CheckpointError
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.model.speaker_encoder import SpeakerEncoder
from deployments.talker.model.talker import Talker
from deployments.talker.text.tokenizer import TextTokenizer
from deployments.weights.checkpoint import read_shapes
from deployments.weights.store import REPOSITORIES
from talkray_tools.byte_tokenizer import ADDED_TOKENS, write_tokenizer
from talkray_tools.random_checkpoint import Fill, Options, main, random_tensors, write_checkpoint
from talkray_tools.released import SHAPES, Shape

TINY = SHAPES["tiny-CustomVoice"]
FLOAT32 = Options(dtype=torch.float32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random") / "checkpoint"
    write_checkpoint(directory, TINY, FLOAT32)
    return directory


def test_a_directory_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        write_checkpoint(tmp_path, TINY, FLOAT32)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_weights_follow_from_the_seed() -> None:
    fills = {"talker.a.weight": Fill(torch.Size([33, 5]), 0.0, 1.0), "talker.b.bias": Fill(torch.Size([7]), 0.0, 1.0)}
    drawn = [random_tensors(fills, Options(seed=seed, dtype=torch.float32)) for seed in (3, 3, 4)]
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in fills)
    assert not any(torch.equal(drawn[0][name], drawn[2][name]) for name in fills)


def test_the_first_values_never_change() -> None:
    values = Fill(torch.Size([4]), 0.0, 1.0).draw("0/talker.x/0", 4)
    assert values.tolist() == [-0.8012073040008545, 0.8054888844490051, -0.29640573263168335, -0.7968728542327881]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_have_the_wanted_mean_and_deviation(dtype: torch.dtype) -> None:
    fill = Fill(torch.Size([1 << 12, 40]), 0.5, 0.25)
    tensor = random_tensors({"x": fill}, Options(dtype=dtype))["x"]
    assert (tensor.dtype, tensor.shape) == (dtype, fill.shape)
    assert float(tensor.float().mean()) == pytest.approx(0.5, abs=0.005)
    assert float(tensor.float().std()) == pytest.approx(0.25, rel=0.01)


def test_pieces_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    fills = {name: Fill(torch.Size([3, 10]), 0.0, 1.0) for name in ("first", "second")}
    monkeypatch.setattr("talkray_tools.random_checkpoint._PIECE", 8)
    for name, tensor in random_tensors(fills, Options(dtype=torch.float32)).items():
        pieces = [fills[name].draw(f"0/{name}/{start}", min(8, 30 - start)) for start in range(0, 30, 8)]
        assert torch.equal(tensor.flatten(), torch.cat(pieces))


@pytest.mark.parametrize("name", REPOSITORIES)
def test_every_released_name_has_its_shape(name: str) -> None:
    size, _, kind = name.partition("-")
    config = SHAPES[name].config
    assert config["tts_model_type"].replace("_", "") == kind.lower()
    assert config["talker_config"]["hidden_size"] == {"0.6B": 1024, "1.7B": 2048}[size]


@pytest.mark.parametrize(
    ("name", "millions"), [("0.6B-CustomVoice", 905.8), ("0.6B-Base", 914.6), ("1.7B-Base", 1928.7)]
)
def test_released_shapes_have_the_released_number_of_parameters(name: str, millions: float, tmp_path: Path) -> None:
    parameters = count_parameters(SHAPES[name], tmp_path)
    assert parameters / 1e6 == pytest.approx(millions, abs=0.05)


def count_parameters(shape: Shape, scratch: Path) -> int:
    (scratch / "config.json").write_text(json.dumps(shape.config))
    config = ModelConfig.load(scratch)
    with torch.device("meta"):
        modules = [Talker(config)] + ([SpeakerEncoder(config.speaker_encoder)] if config.speaker_encoder else [])
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


@pytest.mark.parametrize("shape", [TINY, TINY.with_official_text()])
def test_control_tokens_have_the_ids_of_the_configuration(shape: Shape, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, num_tokens=shape.text_tokens, assistant_token=shape.assistant_token)
    (tmp_path / "config.json").write_text(json.dumps(shape.config))
    config = ModelConfig.load(tmp_path)
    official = Qwen2Tokenizer.from_pretrained(tmp_path)
    prompt = official("<|im_start|>assistant\nAé<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    newline = official.convert_tokens_to_ids("Ċ")
    role = [config.tokens.im_start, shape.assistant_token, newline]
    assert prompt == [*role, *TextTokenizer(tmp_path, config.tokens).encode("Aé"), config.tokens.im_end, newline, *role]
    assert official.convert_tokens_to_ids(list(ADDED_TOKENS)) == list(
        range(shape.text_tokens, shape.text_tokens + len(ADDED_TOKENS))
    )


def test_another_tokenizer_is_copied_and_the_layout_follows_it(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([str(out), "--like", "tiny-Base", "--tokenizer", str(checkpoint)]) == 0
    assert (out / "vocab.json").read_bytes() == (checkpoint / "vocab.json").read_bytes()
    shape = (151936, TINY.config["talker_config"]["text_hidden_size"])
    assert read_shapes(out)["talker.model.text_embedding.weight"] == shape
    assert "speaker_encoder.fc.weight" in read_shapes(out)


def test_a_tokenizer_directory_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"vocab\.json is missing"):
        main([str(tmp_path / "out"), "--like", "tiny-Base", "--tokenizer", str(tmp_path)])
    assert not (tmp_path / "out").exists()
