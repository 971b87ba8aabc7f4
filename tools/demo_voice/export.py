"""Last step: write the trained networks as a checkpoint, unpacked and packed for release.

    python -m tools.demo_voice.export RUN OUT

OUT/official has the official layout. OUT/compact is shipped. It is int8, and lacks the speech encoder, which only
cloning checkpoints need.
"""

import argparse
import gzip
import logging
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from deployments.embedded_voice.checkpoint import FORMAT, ROW_SCALE
from talkray_tools.released import AUDIO_PREPROCESSOR, PREPROCESSOR
from tools.demo_voice.codec_model import load_trained, official_tensors
from tools.demo_voice.shape import SHAPE, codec_config
from tools.demo_voice.train_talker import VOICE_GENERATION, write_json

logger = logging.getLogger(__name__)

_LARGEST = 127
_WORTH_PACKING = 4096  # minimum number of values; smaller tensors are mostly biases and norms


def export(run: Path, out: Path) -> None:
    official, compact = out / "official", out / "compact"
    for directory in (official, compact):
        shutil.rmtree(directory, ignore_errors=True)
    _write_talker(run, official)
    _write_codec(run, official / "speech_tokenizer")
    pack(official, compact, without="encoder.")
    sizes = [file.stat().st_size for file in compact.rglob("*") if file.is_file()]
    logger.info("the packed folder has %.1f MB", sum(sizes) / 1e6)


def pack(checkpoint: Path, packed: Path, *, without: str = "") -> None:
    """Write `checkpoint` to the new folder `packed`, except for tensors whose names begin with `without`.

    `deployments/embedded_voice/checkpoint.py` describes and reads packed folders.
    """
    shutil.copytree(checkpoint, packed, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in sorted(checkpoint.rglob("*.safetensors")):
        stored: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            if not (without and name.startswith(without)):
                stored |= packed_tensor(name, tensor)
        target = packed / file.relative_to(checkpoint)
        target.with_suffix(".safetensors.gz").write_bytes(gzip.compress(save(stored, FORMAT), mtime=0))


def packed_tensor(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Scale each row so its largest value is 127. Rows are output channels, or entries of a table."""
    if tensor.dim() < 2 or tensor.numel() < _WORTH_PACKING:
        return {name: tensor.half()}
    rows = tensor.float().flatten(1)
    scale = rows.abs().amax(1) / _LARGEST
    steps = rows / torch.where(scale > 0, scale, 1.0)[:, None]
    return {name: steps.round().to(torch.int8).view(tensor.shape), name + ROW_SCALE: scale}


def _write_talker(run: Path, directory: Path) -> None:
    shutil.copytree(run / "talker" / "model", directory)
    write_json(directory / "generation_config.json", VOICE_GENERATION)
    write_json(directory / "preprocessor_config.json", PREPROCESSOR)
    checkpoint = torch.load(run / "talker" / "best.pt", map_location="cpu", weights_only=True)
    tensors = {f"talker.{name}": tensor.half().contiguous() for name, tensor in checkpoint["averaged"].items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    logger.info("talker after %d steps, held-out loss %.3f", checkpoint["steps"], checkpoint["held_out"])


def _write_codec(run: Path, directory: Path) -> None:
    directory.mkdir()
    write_json(directory / "config.json", SHAPE.codec)
    write_json(directory / "preprocessor_config.json", AUDIO_PREPROCESSOR)
    tensors = official_tensors(load_trained(run, codec_config(), device="cpu"))
    save_file(_averaged_codebooks(tensors), directory / "model.safetensors", metadata={"format": "pt"})


def _averaged_codebooks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Store entries with a usage of 1 instead of sums, because float16 is too coarse for sums and small counts."""
    averaged = dict(tensors)
    for name, usage in tensors.items():
        if not name.endswith(".cluster_usage"):
            continue
        prefix = name.removesuffix("cluster_usage")
        (sums,) = (prefix + other for other in ("embedding_sum", "embed_sum") if prefix + other in tensors)
        averaged[sums] = tensors[sums] / usage.clamp(min=1e-5)[:, None]
        averaged[name] = torch.ones_like(usage)
    return averaged


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_voice.export")
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    export(options.run, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
