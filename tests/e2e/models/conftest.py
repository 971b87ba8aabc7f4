"""A server with all kinds of models: the embedded voice, two of random weights, the embedded voice that clones."""

import os
from collections.abc import Iterator

import httpx
import pytest
import torch

from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from tests.e2e.black_box import ServerCommand, serving

BOUND_S = 120
RANDOM = ("Base", "VoiceDesign")  # checkpoints of one seed share weights


@pytest.fixture(scope="package")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerCommand]:
    folder = tmp_path_factory.mktemp("several")
    for kind in RANDOM:
        write_checkpoint(folder / kind, SHAPES[f"tiny-{kind}"], Options(dtype=torch.float32))
    models = ("embedded", *(str(folder / kind) for kind in RANDOM), "embedded-base")
    options = [argument for model in models for argument in ("--model", model)]
    data = {"TALKRAY_DATA": os.environ["TALKRAY_DATA"]}  # the tests look at stored voices too
    with serving(folder, *options, environment=data) as server:
        yield server


@pytest.fixture(scope="package")
def client(several: ServerCommand) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=several.url, timeout=BOUND_S) as client:
        yield client
