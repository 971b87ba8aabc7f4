from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.codec.backends.registry import load_decoder
from deployments.codec.decoder import snr_db
from deployments.weights.checkpoint import read_tensors
from talkray_tools import stress
from talkray_tools.random_checkpoint import main
from talkray_tools.unfolded_codec import DecoderNetwork


def write(directory: Path, kind: str, *more: str) -> Path:
    assert main([str(directory), "--like", f"tiny-{kind}", *more]) == 0
    return directory


def test_a_stress_checkpoint_has_what_trained_ones_have(tmp_path: Path) -> None:
    directory = write(tmp_path / "checkpoint", "CustomVoice", "--stress", "outliers")
    talker, codec = read_tensors(directory), read_tensors(directory / "speech_tokenizer")
    assert {tensor.dtype for tensor in (*talker.values(), *codec.values())} == {torch.bfloat16}
    norms = torch.cat([tensor.float() for name, tensor in talker.items() if name.endswith("input_layernorm.weight")])
    assert norms.max() > 30
    assert norms.min() < 0.05
    head = talker["talker.codec_head.weight"].float()
    hidden = torch.nn.functional.normalize(torch.randn(50, head.shape[1]), dim=1) * head.shape[1] ** 0.5
    apart = (hidden @ (head[0:2048:2] - head[1:2048:2]).T).abs().median()
    assert 2e-4 < apart < 5e-3
    beta = torch.cat([tensor.float() for name, tensor in codec.items() if name.endswith("beta")])
    assert 20 < 0.5 * float((-beta).exp().max()) < 5100


def test_scaling_keeps_what_the_codec_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = write(tmp_path / "scaled", "CustomVoice", "--stress", "wide")
    monkeypatch.setattr(stress, "_NORM_EXPONENT", 0)
    monkeypatch.setattr(stress, "_HUGE", 1.0)
    plain = write(tmp_path / "plain", "CustomVoice", "--stress", "wide")
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 2048, (1, 6, 16)))
    one, other = (DecoderNetwork.load(path / "speech_tokenizer").requires_grad_(False) for path in (scaled, plain))
    assert snr_db(other(codes), one(codes)) > 90
    decoder = load_decoder(scaled / "speech_tokenizer")
    audio, _ = decoder.decode(codes, [decoder.initial_state()])
    assert snr_db(other(codes), audio) > 80


def test_an_unknown_stress_is_refused(tmp_path: Path) -> None:
    assert main([str(tmp_path / "out"), "--like", "tiny-Base", "--stress", "much"]) == 2
