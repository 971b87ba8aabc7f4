"""The first run with weights that are not here yet: downloaded from a hub on this machine, spoken with, kept."""

import re
from pathlib import Path

import torch

from serve_app.cli.ray_settings import free_port
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from tests.e2e.black_box import speaks_again
from tests.fake_hub import Hub, repository, serving

NAME = "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"
SHARD = "model-00002-of-00003.safetensors"
SHORT = ("--model", "1.7B-CustomVoice")


def test_weights_are_downloaded_once_and_serve_without_the_hub(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", SHAPES["tiny-CustomVoice"], Options(dtype=torch.float32))
    files = repository(tmp_path / "checkpoint", shards=3)
    with serving(Hub({NAME: files})) as hub:
        hub.breaks = [(50_000, False), (100_000, True)]
        variables = hub.variables(tmp_path)
        output = speaks_again(tmp_path, free_port(), *SHORT, environment=variables)
    assert re.search(rf"downloading {NAME}: [\d.]+.?B of [\d.]+MB", output)
    assert hub.served(SHARD)
    offline = variables | {"HF_HUB_OFFLINE": "1"}
    assert "downloading" not in speaks_again(tmp_path, free_port(), *SHORT, environment=offline)
