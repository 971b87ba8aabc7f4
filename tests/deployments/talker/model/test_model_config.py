import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.errors import CheckpointError
from deployments.talker.model.model_config import ModelConfig, TextNeeds


def load_with(directory: Path, scratch: Path, talkray: object) -> ModelConfig:
    config = json.loads((directory / "config.json").read_text())
    (scratch / "config.json").write_text(json.dumps(config | {"talkray": talkray}))
    return ModelConfig.load(scratch)


def test_a_checkpoint_says_what_text_it_needs(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = tiny_checkpoint("CustomVoice")
    assert ModelConfig.load(directory).text == TextNeeds(max_segment_chars=1000)
    assert load_with(directory, tmp_path, {}).text == TextNeeds(max_segment_chars=1000)
    needs = {"spoken_form": "english", "max_segment_chars": 300}
    assert load_with(directory, tmp_path, needs).text == TextNeeds("english", max_segment_chars=300)


@pytest.mark.parametrize("needs", [{"spoken_form": "latin"}, {"max_segment_chars": 0}, {"max_segment_chars": "300"}])
def test_wrong_needs_named(tiny_checkpoint: Callable[[str], Path], tmp_path: Path, needs: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: talkray\."):
        load_with(tiny_checkpoint("CustomVoice"), tmp_path, needs)


@pytest.mark.parametrize(("option", "remedy"), [("temperature", "more than 0"), ("top_p", "more than 0")])
def test_a_bad_option_named(tiny_checkpoint: Callable[[str], Path], tmp_path: Path, option: str, remedy: str) -> None:
    directory = shutil.copytree(tiny_checkpoint("CustomVoice"), tmp_path / "copy")
    (directory / "generation_config.json").write_text(json.dumps({option: 0}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"generation_config.json: {option} is 0.*: set it to {remedy}"):
        ModelConfig.load(directory)


def test_an_option_that_is_null_has_its_default(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_checkpoint("CustomVoice"), tmp_path / "copy")
    (directory / "generation_config.json").write_text('{"top_p": null, "top_k": 0}', encoding="utf-8")
    generation = ModelConfig.load(directory).generation
    assert (generation.top_p, generation.top_k) == (1.0, 0)
