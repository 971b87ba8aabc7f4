"""Train the speaker encoder of `embedded-base`, which clones the voice of a recording.

    python -m tools.demo_voice.clone_encoder RUN [--recordings 1200] [--minutes 12] [--out PACKED_BASE]

The talker is the demo voice's. It has a vector for each of eight speakers, and can also speak with a mixture of them.
The encoder therefore learns from the voice itself. First, the voice speaks with random mixtures (RUN/recordings.npz).
The encoder then learns the mixture of each recording despite changes of level, microphone and noise. A recording of
another person gets the most similar mixture. Training runs on two cores; PACKED_BASE is unpacked over `packed/`.
"""

import argparse
import gzip
import json
import logging
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from torch import Tensor, nn

from deployments.config import TalkerConfig
from deployments.embedded_voice.checkpoint import EMBEDDED, EMBEDDED_BASE, FORMAT, PACKED, unpack
from deployments.protocol import ALL_FRAMES, ClonePrompt, Reference, Sampling, SynthesisRequest
from deployments.talker.engine.startup import StartClock, load_engine
from deployments.talker.model.model_config import ModelConfig, SpeakerEncoderConfig
from deployments.talker.model.speaker_encoder import SpeakerEncoder, log_mel
from deployments.weights.store import locate
from tools.demo_voice.export import packed_tensor
from tools.demo_voice.manners import PLAIN
from tools.demo_voice.texts import lines
from tools.demo_voice.train_talker import write_json

logger = logging.getLogger(__name__)

SHAPE = SpeakerEncoderConfig(
    enc_dim=256, mel_dim=80, enc_channels=(64, 64, 64, 64, 192), enc_res2net_scale=4,
    enc_attention_channels=32, enc_se_channels=32,
)  # fmt: skip
_TABLE = "talker.model.codec_embedding.weight"
_STREAMS = 16  # spoken in parallel
_CHARACTERS = range(25, 60)
_FRAMES = 160  # spectrogram frames per training example: 1.7 s
_BATCH, _RATE = 24, 2e-3
_HELD_OUT = 15  # one recording in this many is held out


def speak(base: Path, file: Path, recordings: int, *, seed: int = 0) -> None:
    """Write `recordings` utterances of random mixtures: concatenated `pcm` int16, `lengths`, and `shares` [n, 8]."""
    engine = load_engine(base, TalkerConfig(max_num_seqs=_STREAMS, threads=1), StartClock())
    draw, generator = random.Random(seed), np.random.default_rng(seed)
    speakers = speaker_vectors().numpy()
    sentences = [line.text for line in lines(1.0, ("nora",), seed=seed) if line.manner is PLAIN]
    sentences = [text for text in sentences if len(text) in _CHARACTERS]
    options = Sampling(max_new_tokens=60, temperature=0.3, subtalker_temperature=0.6)
    shares: dict[int, NDArray[np.float64]] = {}
    audio: dict[int, list[bytes]] = {}
    done: list[int] = []
    while len(done) < recordings:
        while len(audio) - len(done) < _STREAMS and len(audio) < recordings:
            number = len(audio)
            shares[number], audio[number] = mixture(generator), []
            prompt = ClonePrompt((shares[number] @ speakers).astype(np.float32))
            reference = Reference(None, x_vector_only=True, prompt=prompt, key=str(number).encode())
            synthesis = SynthesisRequest(
                "clone", draw.choice(sentences), language="english", sampling=options, seed=number, reference=reference,
                gpu_frames=ALL_FRAMES,
            )  # fmt: skip
            engine.add(number, synthesis)
        for number, chunk in engine.step().chunks:
            audio[number].append(chunk.pcm or b"")
            if chunk.finish_reason is not None:
                done.append(number)
                if len(done) % 100 == 0:
                    logger.info("%d of %d recordings generated", len(done), recordings)
    spoken = [np.frombuffer(b"".join(audio[number]), np.int16) for number in done]
    lengths = np.array([len(each) for each in spoken])
    np.savez(file, pcm=np.concatenate(spoken), lengths=lengths, shares=np.stack([shares[number] for number in done]))


def mixture(generator: np.random.Generator) -> NDArray[np.float64]:
    """Return shares [8] that add up to 1: one, two or three speakers, or one speaker moved away from another."""
    shares = np.zeros(len(speaker_vectors()))
    kind = generator.choice(4, p=(0.7, 0.2, 0.06, 0.04))
    chosen = generator.choice(len(shares), 3, replace=False)
    if kind == 0:
        shares[chosen[0]] = 1.0
    elif kind == 2:
        shares[chosen] = generator.dirichlet(np.ones(3))
    else:
        shares[chosen[0]] = generator.uniform(0, 1) if kind == 1 else generator.uniform(1, 1.35)
        shares[chosen[1]] = 1 - shares[chosen[0]]
    return shares


class Mixtures:
    """Spectrograms of the recordings, and their mixtures."""

    def __init__(self, file: Path) -> None:
        stored = np.load(file)
        ends = np.cumsum(stored["lengths"])
        waves = np.split(stored["pcm"].astype(np.float32), ends[:-1])
        self.spectrograms = [
            log_mel(
                torch.from_numpy(wave / (2 * np.abs(wave).max())),
                torch.tensor(len(wave)),
                sample_rate=24000,
                num_mels=SHAPE.mel_dim,
            )
            for wave in waves
        ]
        self.shares = torch.from_numpy(stored["shares"]).float()
        numbers = np.arange(len(waves))
        self.held_out, self.others = numbers[::_HELD_OUT], numbers[numbers % _HELD_OUT > 0]
        self._generator = np.random.default_rng(0)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield [_BATCH, mels, _FRAMES] with simulated microphones and noise, and the shares [_BATCH, 8]."""
        while True:
            chosen = self._generator.choice(self.others, _BATCH)
            heard = torch.stack([self._recorded(self._cut(self.spectrograms[number])) for number in chosen])
            yield heard, self.shares[chosen]

    def check(self) -> tuple[Tensor, Tensor]:
        """Return the held-out recordings without noise."""
        cut = torch.stack([self._cut(self.spectrograms[number]) for number in self.held_out])
        return cut, self.shares[self.held_out]

    def _cut(self, mel: Tensor) -> Tensor:
        """Return _FRAMES frames from a random position. A short spectrogram is repeated."""
        repeated = mel.repeat(1, -(-_FRAMES // mel.shape[1]))
        begin = self._generator.integers(repeated.shape[1] - _FRAMES + 1)
        return repeated[:, begin : begin + _FRAMES]

    def _recorded(self, mel: Tensor) -> Tensor:
        """Change the level, apply a parabolic microphone response over the bands, and add sloped noise."""
        level, slope, bow, floor, tilt = self._generator.normal((-0.9, 0, 0, -8, 0), (0.8, 0.5, 0.3, 1.7, 1.0))
        band = torch.linspace(-1, 1, len(mel))[:, None]
        noise = floor + tilt * band + 0.5 * torch.randn_like(mel)
        return torch.logaddexp(2 * (mel + level + slope * band + bow * band.square()), 2 * noise) / 2


def train(recordings: Mixtures, minutes: float) -> SpeakerEncoder:
    """Train the encoder. Its last layer yields seven shares during training, and the mixture's vector afterwards."""
    speakers = speaker_vectors()
    encoder = SpeakerEncoder(SHAPE)
    head = encoder.fc = nn.Conv1d(SHAPE.enc_channels[-1] * 2, len(speakers) - 1, 1)
    scale = (speakers - speakers.mean(0)).norm(dim=1).mean()

    def wrong(heard: Tensor, shares: Tensor) -> Tensor:
        """Return squared vector distances [n], in units of a speaker's distance from the mean of all speakers."""
        seven = encoder(heard, torch.tensor(_FRAMES))
        guessed = torch.cat((seven, 1 - seven.sum(1, keepdim=True)), 1)
        distances: Tensor = ((guessed - shares) @ speakers / scale).square().sum(1)
        return distances

    optimizer = torch.optim.AdamW(encoder.parameters(), _RATE, weight_decay=1e-2)
    begin_s, told_s = time.monotonic(), 0.0
    for step, (heard, shares) in enumerate(recordings.batches()):
        passed = (time.monotonic() - begin_s) / 60 / minutes
        if passed >= 1:
            break
        rate = _RATE * min(1, step / 100) * (1 + np.cos(np.pi * passed)) / 2
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        wrong(heard, shares).clamp(max=4).mean().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        if time.monotonic() - told_s > 20:
            told_s = time.monotonic()
            with torch.no_grad():
                logger.info(
                    "%3.0f %%: %d steps, held-out distance %.3f", 100 * passed, step, wrong(*recordings.check()).mean()
                )
    relative = (speakers[:-1] - speakers[-1]).T
    encoder.fc = nn.Conv1d(head.in_channels, SHAPE.enc_dim, 1)
    encoder.fc.weight.data = (relative @ head.weight.data[:, :, 0])[:, :, None]
    assert head.bias is not None
    encoder.fc.bias = nn.Parameter(relative @ head.bias.data + speakers[-1])
    return encoder


def speaker_vectors() -> Tensor:
    """Return the speaker vectors [8, 256] of the talker's table."""
    table = load_file(locate("embedded") / "model.safetensors")[_TABLE].float()
    return table[list(ModelConfig.load(locate("embedded")).speakers.values())]


def write(encoder: SpeakerEncoder, packed: Path) -> None:
    """Write the files that `embedded-base` adds to those of the demo voice."""
    source = PACKED[EMBEDDED][0]
    shutil.rmtree(packed, ignore_errors=True)
    (packed / "speech_tokenizer").mkdir(parents=True)
    shutil.copy(source / "speech_tokenizer" / "config.json", packed / "speech_tokenizer")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["tts_model_type"] = "base"
    config["talker_config"] |= {"spk_id": {}, "spk_is_dialect": {}}
    config["speaker_encoder_config"] = asdict(SHAPE)
    config["talkray"] = {**config["talkray"], "clones_by_vector": True}
    write_json(packed / "config.json", config)
    stored: dict[str, Tensor] = {}
    for name, tensor in encoder.state_dict().items():
        stored |= packed_tensor(f"speaker_encoder.{name}", tensor)
    (packed / "model.safetensors.gz").write_bytes(gzip.compress(save(stored, FORMAT), mtime=0))


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_voice.clone_encoder")
    parser.add_argument("run", type=Path)
    parser.add_argument("--recordings", type=int, default=1200)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--out", type=Path, default=PACKED[EMBEDDED_BASE][-1])
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    file = options.run / "recordings.npz"
    if not file.exists():
        untrained = options.run / "untrained"
        options.run.mkdir(parents=True, exist_ok=True)
        write(SpeakerEncoder(SHAPE), untrained / "packed")
        unpack((PACKED[EMBEDDED][0], untrained / "packed"), untrained / "checkpoint")
        speak(untrained / "checkpoint", file, options.recordings)
    write(train(Mixtures(file), options.minutes), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
