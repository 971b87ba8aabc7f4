import pickle

import pytest
from pydantic import ValidationError

from deployments.config import CodecConfig, TalkerConfig


@pytest.mark.parametrize("config", [TalkerConfig, CodecConfig])
def test_an_unknown_key_is_an_error_that_names_it(config: type[TalkerConfig] | type[CodecConfig]) -> None:
    with pytest.raises(ValidationError, match=r"max_num_sequences\n.*not permitted"):
        config.model_validate({"max_num_sequences": 4})


@pytest.mark.parametrize(("config", "key", "value"), [
    (TalkerConfig, "device", "gpu"), (TalkerConfig, "threads", 0), (TalkerConfig, "max_num_seqs", 0),
    (TalkerConfig, "max_num_waiting", -1), (TalkerConfig, "max_model_len", 63), (TalkerConfig, "kv_cache_bytes", 0),
    (TalkerConfig, "gpu_memory_fraction", 0), (TalkerConfig, "gpu_memory_fraction", 1.1),
    (TalkerConfig, "attention", "sdpa"),
    (CodecConfig, "device", "tpu"), (CodecConfig, "workers", 0), (CodecConfig, "precision", "int8"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(config: type[TalkerConfig | CodecConfig], key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=key):
        config.model_validate({key: value})


def test_the_cache_is_sized_in_one_way() -> None:
    with pytest.raises(ValidationError, match="set one of them"):
        TalkerConfig(gpu_memory_fraction=0.5, kv_cache_bytes=1 << 30)


def test_settings_read_from_yaml_are_frozen_values() -> None:
    config = CodecConfig.model_validate({"placement": "pool"})
    with pytest.raises(ValidationError, match="frozen"):
        config.workers = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(CodecConfig(placement="pool"))
