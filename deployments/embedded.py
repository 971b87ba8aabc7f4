"""The model that needs no download: the architecture at a small size with random weights.

It babbles, in four voices, and takes the whole path that a released checkpoint takes. Generated on first use.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch

from deployments.protocol import ModelKind
from deployments.random_checkpoint import Options, write_checkpoint
from deployments.released import Shape, StackShape

VERSION = 2

_SHAPE = Shape(
    kind=ModelKind.CUSTOM_VOICE,
    size="1b7",
    talker=StackShape(hidden=256, intermediate=512, layers=4, heads=4, kv_heads=2, head_dim=64),
    predictor=StackShape(hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2, head_dim=32),
    text_hidden=256,
    text_tokens=264,
    text_vocab=320,
    assistant_token=263,
    num_codes=512,
    unit_scale=True,
    eos_scale=1.7,  # a sentence lasts three to five seconds on average
    languages={"english": 2},
    speakers={"nora": 1001, "felix": 1002, "iris": 1003, "hugo": 1004},
    dialects={},
    codec_decoder={
        "latent_dim": 256,
        "codebook_dim": 128,
        "decoder_dim": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "vector_quantization_hidden_dimension": 64,
    },
    codec_encoder={
        "codebook_dim": 8,
        "head_dim": 8,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_filters": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "upsample_groups": 16,
        "vector_quantization_hidden_dimension": 8,
    },
)


def embedded_path() -> Path:
    """The directory of the embedded checkpoint; written first where this user has none yet.

    It is written aside and renamed, so that a reader sees all of it or nothing and two writers at once do no harm.
    """
    directory = cache_directory() / f"embedded-{VERSION}"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix="embedded-") as scratch:
            written = Path(scratch) / "checkpoint"
            write_embedded(written)
            _publish(written, directory)
    return directory


def cache_directory() -> Path:
    """Where generated files live: TALKRAY_CACHE, else the user's cache."""
    named = os.environ.get("TALKRAY_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "talkray"


def write_embedded(directory: Path) -> None:
    """Write the embedded checkpoint to a new directory; the same tensors every time."""
    write_checkpoint(directory, _SHAPE, Options(dtype=torch.float16, codec_dtype=torch.float16))


def _publish(written: Path, directory: Path) -> None:
    try:
        written.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        shutil.rmtree(written)  # another process was first
