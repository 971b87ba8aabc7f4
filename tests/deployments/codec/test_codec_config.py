import copy
import json
from pathlib import Path
from typing import Any

import pytest

from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.errors import CheckpointError
from talkray_tools.released import SHAPES


@pytest.fixture
def values(directory: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return copy.deepcopy(loaded)


def test_derived_numbers(directory: Path) -> None:
    config = SpeechTokenizerConfig.load(directory)
    assert (config.sample_rate, config.frame_samples, config.num_code_groups) == (300, 24, 4)
    assert config.encoder.downsample_stride == 2


def test_unknown_keys_are_ignored(values: dict[str, Any]) -> None:
    plain = SpeechTokenizerConfig.from_dict(values)
    values["decoder_config"]["attention_dropout"] = 0.0
    assert SpeechTokenizerConfig.from_dict({**values, "transformers_version": "5"}) == plain


@pytest.mark.parametrize(("section", "key"), [
    ("", "output_sample_rate"), ("decoder_config", "latent_dim"), ("encoder_config", "num_filters"),
    ("", "decoder_config"),
])  # fmt: skip
def test_a_missing_key_is_named(values: dict[str, Any], section: str, key: str) -> None:
    del (values[section] if section else values)[key]
    with pytest.raises(CheckpointError, match=f"{section}.?{key}"):
        SpeechTokenizerConfig.from_dict(values)


def test_upsampling_must_reach_the_sample_rate(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="multiply to 24"):
        SpeechTokenizerConfig.from_dict({**values, "decode_upsample_rate": 1920})


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_bad_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        SpeechTokenizerConfig.load(tmp_path)


def test_released_shapes_suit_matrix_units_and_tiny_ones_do_not() -> None:
    for name, suits in (("1.7B-CustomVoice", True), ("0.6B-Base", True), ("tiny-CustomVoice", False)):
        decoder = SpeechTokenizerConfig.from_dict(SHAPES[name].codec).decoder
        assert decoder.suits_matrix_units is suits


def test_a_dozen_frames_reach_into_a_sample_of_the_released_shape() -> None:
    assert SpeechTokenizerConfig.from_dict(SHAPES["1.7B-CustomVoice"].codec).decoder.convolved_frames == 11
