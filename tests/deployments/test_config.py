import pickle

import pytest
from pydantic import ValidationError

from deployments.config import CodecConfig, TalkerConfig


@pytest.mark.parametrize("config", [TalkerConfig, CodecConfig])
def test_an_unknown_key_is_an_error_that_names_it(config: type[TalkerConfig] | type[CodecConfig]) -> None:
    with pytest.raises(ValidationError, match=r"max_num_sequences\n.*not permitted"):
        config.model_validate({"max_num_sequences": 4})


@pytest.mark.parametrize(("key", "value"), [
    ("device", "gpu"), ("threads", 0), ("max_num_seqs", 0), ("max_num_waiting", -1),
    ("max_model_len", 63), ("kv_cache_bytes", 0), ("gpu_memory_fraction", 0),
    ("gpu_memory_fraction", 1.1), ("attention", "sdpa"),
])  # fmt: skip
def test_talker_settings_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=key):
        TalkerConfig.model_validate({key: value})


def test_the_cache_is_sized_in_one_way() -> None:
    with pytest.raises(ValidationError, match="set one of them"):
        TalkerConfig(gpu_memory_fraction=0.5, kv_cache_bytes=1 << 30)


@pytest.mark.parametrize(("key", "value"), [("device", "tpu"), ("workers", 0), ("precision", "int8")])
def test_codec_settings_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=key):
        CodecConfig.model_validate({key: value})


def test_settings_read_from_yaml_are_frozen_values() -> None:
    config = CodecConfig.model_validate({"placement": "pool"})
    with pytest.raises(ValidationError, match="frozen"):
        config.workers = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(CodecConfig(placement="pool"))
