"""Third step: every utterance as codes.

    python -m deployments.demo_voice.encode RUN

Writes RUN/codes.i16 and RUN/frames.json. Utterances are padded with silence to whole frames; convolutions are causal,
so what pads a batch to its longest utterance changes nothing before it.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deployments.codec.encoder import CodecEncoder
from deployments.demo_voice.codec_model import load_trained, served
from deployments.demo_voice.shape import codec_config
from deployments.demo_voice.train_codec import read_index
from deployments.protocol import Codes

logger = logging.getLogger(__name__)

_FULL_SCALE = 32767
_CHECKED = 20


class Utterances:
    """The recordings of a run."""

    def __init__(self, run: Path, frame_samples: int) -> None:
        rows = read_index(run)
        self._audio = np.memmap(run / "audio.i16", np.int16, "r")
        self._spans = [(row.start, row.samples) for row in rows]
        self._frame_samples = frame_samples
        self.frames = [-(-samples // frame_samples) for _, samples in self._spans]

    def __len__(self) -> int:
        return len(self._spans)

    def padded(self, index: int, num_frames: int) -> NDArray[np.float32]:
        """Samples of an utterance and silence up to `num_frames` frames."""
        start, samples = self._spans[index]
        out = np.zeros(num_frames * self._frame_samples, np.float32)
        out[:samples] = self._audio[start : start + samples].astype(np.float32) / _FULL_SCALE
        return out

    def batches(self, max_frames: int) -> Iterator[list[int]]:
        """Indices of utterances of similar length, longest first, `max_frames` at most with their padding."""
        order = sorted(range(len(self)), key=lambda index: -self.frames[index])
        while order:
            size = max(1, max_frames // self.frames[order[0]])
            yield order[:size]
            order = order[size:]


@torch.inference_mode()
def encode_batch(encoder: CodecEncoder, audio: torch.Tensor) -> Codes:
    """Codes [B, frames, groups] of [B, samples] of whole frames, as CodecEncoder gives them one by one."""
    network = encoder.network
    x = network.encoder(audio[:, None])
    x = network.encoder_transformer(x.transpose(1, 2)).transpose(1, 2)
    latents = network.downsample(x)  # [B, hidden, frames]
    rows = latents.transpose(1, 2).flatten(0, 1).T[None]  # quantized frame by frame: as one long recording
    codes = network.quantizer.encode(rows, encoder.num_quantizers)
    out: Codes = codes.view(len(audio), -1, encoder.num_quantizers).to(torch.int16).cpu().numpy()
    return out


def encode(run: Path, *, max_frames: int) -> None:
    """Encode a run and compare a sample of it with the served encoder."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = codec_config()
    encoder, _ = served(load_trained(run, config, device=device), device)
    utterances = Utterances(run, config.frame_samples)
    results: list[Codes | None] = [None] * len(utterances)
    begin, done, total = time.perf_counter(), 0, sum(utterances.frames)
    for number, batch in enumerate(utterances.batches(max_frames)):
        longest = utterances.frames[batch[0]]
        audio = torch.from_numpy(np.stack([utterances.padded(index, longest) for index in batch])).to(device)
        for index, codes in zip(batch, encode_batch(encoder, audio), strict=True):
            results[index] = codes[: utterances.frames[index]]
            done += utterances.frames[index]
        if number % 20 == 0:
            elapsed_s = time.perf_counter() - begin
            logger.info(f"{done}/{total} frames, {elapsed_s / done * (total - done):.0f} s left")
    codes = [result for result in results if result is not None]
    assert len(codes) == len(utterances)
    _check(encoder, utterances, codes)
    np.concatenate(codes).astype("<i2").tofile(run / "codes.i16")
    (run / "frames.json").write_text(json.dumps(utterances.frames) + "\n", encoding="utf-8")
    logger.info(f"{total} frames of {len(utterances)} utterances in {time.perf_counter() - begin:.0f} s")


def _check(encoder: CodecEncoder, utterances: Utterances, codes: list[Codes]) -> None:
    """Batching may move a latent across the border between two entries, which must stay rare."""
    chosen = range(0, len(utterances), max(1, len(utterances) // _CHECKED))
    equal = [
        np.mean(encoder.encode(utterances.padded(index, utterances.frames[index])) == codes[index]) for index in chosen
    ]
    logger.info(f"{np.mean(equal):.2%} of the codes are what the served encoder gives alone")
    assert np.mean(equal) > 0.97, "batched codes differ from those of single recordings"


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deployments.demo_voice.encode")
    parser.add_argument("run", type=Path)
    parser.add_argument("--max-frames", type=int, default=4000, help="of a batch")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    torch.backends.cudnn.allow_tf32 = False  # the nearest entry is sensitive
    torch.backends.cuda.matmul.allow_tf32 = False
    encode(options.run, max_frames=options.max_frames)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
