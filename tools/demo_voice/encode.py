"""Third step: encode every utterance as codes.

    python -m tools.demo_voice.encode RUN

Writes RUN/codes.i16 and RUN/frames.json. Utterances are whole frames. The encoder also reads part of a frame on each
side, which is the neighbouring frame for all but the first and the last frames.
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

from deployments.protocol import Codes
from tools.demo_voice.codec_model import load_trained
from tools.demo_voice.shape import PHONE_SAMPLES, PHONES_PER_FRAME, codec_config
from tools.demo_voice.train_codec import read_index

logger = logging.getLogger(__name__)

_FULL_SCALE = 32767


class Recordings:
    """The recordings of a run, and their sounds."""

    def __init__(self, run: Path, frame_samples: int) -> None:
        self.rows = read_index(run)
        self.frames = [row.samples // frame_samples for row in self.rows]
        assert all(row.samples % frame_samples == 0 for row in self.rows), "utterances are whole frames"
        self._audio = np.memmap(run / "audio.i16", np.int16, "r")
        self._phones = np.memmap(run / "phones.u8", np.uint8, "r").reshape(-1, PHONES_PER_FRAME)
        self._frame_samples = frame_samples

    def batches(self, max_frames: int) -> Iterator[list[int]]:
        """Yield indices of utterances of similar length, longest first, at most `max_frames` including padding."""
        order = sorted(range(len(self.rows)), key=lambda index: -self.frames[index])
        first = 0
        while first < len(order):
            size = max(1, max_frames // self.frames[order[first]])
            yield order[first : first + size]
            first += size

    def padded(self, batch: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples [B, samples] int16 and sounds [B, frames, parts], zero after each utterance's end."""
        longest = self.frames[batch[0]]
        audio = np.zeros((len(batch), longest * self._frame_samples), np.int16)
        phones = np.zeros((len(batch), longest, PHONES_PER_FRAME), np.uint8)
        for place, row in enumerate(self.rows[index] for index in batch):
            audio[place, : row.samples] = self._audio[row.start : row.start + row.samples]
            first, count = row.start // self._frame_samples, row.samples // self._frame_samples
            phones[place, :count] = self._phones[first : first + count]
        return torch.from_numpy(audio), torch.from_numpy(phones)


def encode(run: Path, *, max_frames: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = codec_config()
    assert config.frame_samples == PHONE_SAMPLES * PHONES_PER_FRAME
    model = load_trained(run, config, device=device)
    recordings = Recordings(run, config.frame_samples)
    results: list[Codes | None] = [None] * len(recordings.rows)
    begin = time.perf_counter()
    for batch in recordings.batches(max_frames):
        audio, phones = recordings.padded(batch)
        codes = model.codes(audio.to(device).float() / _FULL_SCALE, phones.to(device).long())
        for index, frames in zip(batch, codes.to(torch.int16).cpu().numpy(), strict=True):
            results[index] = frames[: recordings.frames[index]]
    encoded = [result for result in results if result is not None]
    assert len(encoded) == len(results)
    np.concatenate(encoded).astype("<i2").tofile(run / "codes.i16")
    (run / "frames.json").write_text(json.dumps(recordings.frames) + "\n", encoding="utf-8")
    logger.info(f"{sum(recordings.frames)} frames of {len(results)} utterances in {time.perf_counter() - begin:.0f} s")


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_voice.encode")
    parser.add_argument("run", type=Path)
    parser.add_argument("--max-frames", type=int, default=20000, help="of a batch")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    encode(options.run, max_frames=options.max_frames)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
