import json

from deployments.embedded_voice.checkpoint import EMBEDDED, PACKED
from talkray_tools.released import SHAPES, changed
from tools.demo_voice.shape import SHAPE


def test_sections_are_changed_and_other_values_replaced() -> None:
    config = {"size": 1, "talker_config": {"layers": 2, "spk_id": {"a": 1}}}
    changes = {"size": 3, "talker_config": {"spk_id": {"b": 2}}, "speaker_encoder_config": {"enc_dim": 4}}
    assert changed(config, changes) == {"size": 3, "talker_config": {"layers": 2, "spk_id": {"b": 2}}}
    assert config["size"] == 1


def test_a_tiny_shape_changes_no_released_one() -> None:
    assert SHAPES["1.7B-Base"].config["talker_config"]["hidden_size"] == 2048
    assert SHAPES["tiny-Base"].config["talker_config"]["hidden_size"] == 64


def test_the_shipped_voice_has_the_shape_of_its_recipe() -> None:
    (packed,) = PACKED[EMBEDDED]
    shipped = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    assert shipped.pop("talkray")["spoken_form"] == "english"
    assert shipped == SHAPE.config
    assert json.loads((packed / "speech_tokenizer" / "config.json").read_text(encoding="utf-8")) == SHAPE.codec
