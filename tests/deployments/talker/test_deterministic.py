"""`deterministic: true` on a GPU: a stream's codes are those it has alone, whoever runs beside it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.config import TalkerConfig
from deployments.protocol import Sampling, SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine, warm_up
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.state.kv_cache import KVCache
from deployments.talker.state.sequence import Sequence
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES, Json
from tests.deployments.talker.driving import GREEDY, ask, resumed, speak, speak_all

pytestmark = pytest.mark.gpu

TINY = SHAPES["tiny-CustomVoice"]
LARGE = SHAPES["1.7B-CustomVoice"].config["talker_config"]
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def two_layers(stack: Json) -> Json:
    return {**{key: stack[key] for key in WIDTHS}, "num_hidden_layers": 2}


# As wide as the layers of the 1.7B checkpoint, in which the measured tiles run.
WIDE = TINY.changed(
    {
        "talker_config": {
            **two_layers(LARGE),
            "rope_scaling": LARGE["rope_scaling"],
            "code_predictor_config": two_layers(LARGE["code_predictor_config"]),
        }
    }
)
BLOCK_SIZE, MAX_NUM_SEQS = 64, 24
SAMPLINGS = (Sampling(), Sampling(temperature=1.3, subtalker_top_k=0), Sampling(top_p=0.8, subtalker_top_p=0.7), GREEDY)


def random_requests(count: int) -> list[SynthesisRequest]:
    draw = np.random.default_rng(0)
    return [
        ask(
            "A word or two, " * int(draw.integers(1, 12)),
            frames=int(draw.integers(5, 90)),
            seed=int(draw.integers(1 << 62)),
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            non_streaming_mode=number % 3 == 0,
            ignore_eos=number % 5 > 0,
        )
        for number in range(count)
    ]


def load(checkpoint: Path, *, num_blocks: int = 1000) -> Engine:
    talker = ModelConfig.load(checkpoint).talker
    config = TalkerConfig(
        device="cuda", max_num_seqs=MAX_NUM_SEQS, max_num_waiting=64, max_model_len=1024,
        deterministic=True,
        kv_cache_bytes=num_blocks * BLOCK_SIZE * KVCache.bytes_per_position(talker, torch.bfloat16),
    )  # fmt: skip
    return build_engine(checkpoint, config)


@pytest.mark.parametrize("shape", [TINY, WIDE], ids=["tiny", "wide"])
def test_codes_do_not_depend_on_company(shape: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "checkpoint", shape, Options())  # type: ignore[arg-type]
    requests = random_requests(40)
    engine = load(tmp_path / "checkpoint")
    assert "fused" in engine.runner.networks.name
    warm_up(engine)
    before = engine.runner.graphs.num_eager
    alone = [speak(engine, request) for request in requests]

    def check(codes: list[np.ndarray]) -> None:
        for number, (one, other) in enumerate(zip(codes, alone, strict=True)):
            np.testing.assert_array_equal(one, other.codes, f"stream {number}")

    check([spoken.codes for spoken in speak_all(engine, requests)])
    check([spoken.codes for spoken in speak_all(engine, requests, steps_between=3)])
    later = [resumed(request, one.codes[:4]) for request, one in zip(requests, alone, strict=True)]
    rests = speak_all(engine, later, steps_between=1)
    check([np.concatenate((one.codes[:4], rest.codes)) for one, rest in zip(alone, rests, strict=True)])
    assert engine.runner.graphs.num_eager == before

    tight = load(tmp_path / "checkpoint", num_blocks=30)
    preempted: list[Sequence] = []
    preempt = tight.scheduler._preempt
    monkeypatch.setattr(tight.scheduler, "_preempt", lambda each: (preempted.append(each), preempt(each)))
    check([spoken.codes for spoken in speak_all(tight, requests, steps_between=1)])
    assert any(sequence.num_frames for sequence in preempted)
