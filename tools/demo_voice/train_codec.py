"""Second step: train the codec.

    python -m tools.demo_voice.train_codec RUN --minutes 14

Spectral losses and a classifier of sounds apply from the start, discriminators after a third of the time. The encoder
is trained for five minutes, and the first call ends. After the corpus is encoded, a second call trains only the
decoder for the rest. Learning rates follow the elapsed share of --minutes, so training anneals on any machine.
RUN/codec/latest.pt is written every minute, and an interrupted call resumes from it. RUN/codec/weights.pt has only the
weights; if it exists alone, a new training starts from it. On a GPU, the decoder's convolutions are compiled, and
steps are captured and replayed, because a step has thousands of small kernels.
At the end, RUN/codec/report.json receives the distances of the served networks from held-out recordings.
"""

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tools.demo_voice.codec_model import CodecModel, served
from tools.demo_voice.judges import (
    Discriminators,
    SoundClassifier,
    discriminator_loss,
    generator_loss,
    sound_loss,
)
from tools.demo_voice.shape import PHONE_SAMPLES, PHONES_PER_FRAME, codec_config
from tools.demo_voice.spectral import SpectralLoss

logger = logging.getLogger(__name__)

_FULL_SCALE = 32767


@dataclass(frozen=True, slots=True)
class CodecRecipe:
    """The training recipe."""

    minutes: float
    encoder_minutes: float = 5  # training time of encoder and codebooks, which are frozen afterwards
    batch: int = 8
    window_frames: int = 32  # longer than the decoder's attention
    unsettled_frames: int = 2  # ignored at the start of a window within speech, because the zero state is wrong there
    judged_frames: int = 8  # frames of a window that the discriminators see
    from_start: float = 0.25  # share of windows at the beginning of an utterance
    adversarial_from: float = 0.3  # share of the time after which discriminators are used
    revive_until: float = 0.75  # share of the codebooks' training time during which dead entries are reset
    dead: float = 0.05  # entries of a codebook used less than this share of the mean are reset
    warm_up: float = 0.01
    first_batches: int = 96  # batches that initialize the codebooks
    rate: float = 4e-4
    judges_rate: float = 2e-4
    final_rate: float = 0.01  # last learning rate, relative to the first
    clip: float = 200.0
    log_every: int = 100
    save_every_s: float = 60.0
    mel_weight: float = 30.0
    linear_weight: float = 2.0
    commitment_weight: float = 2.0
    score_weight: float = 6.0
    feature_weight: float = 10.0
    sound_weight: float = 2.0
    sound_feature_weight: float = 5.0


class Captured:
    """A training step that is captured once and then replayed."""

    _WARM_UP = 3

    def __init__(
        self, step: Callable[[], Mapping[str, Tensor]], *, pool: "torch.cuda._POOL_HANDLE | None" = None
    ) -> None:
        """`pool` is the memory pool of another captured step that never runs at the same time."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(self._WARM_UP):  # warm-up steps train, too
                step()
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._losses = step()
        self.pool = self._graph.pool()

    def __call__(self) -> Mapping[str, Tensor]:
        """Run one step. The next step overwrites the returned losses."""
        self._graph.replay()
        return self._losses


class Windows:
    """Random windows of the training audio, all of which is on the device."""

    def __init__(self, run: Path, settings: CodecRecipe, *, frame_samples: int, device: torch.device) -> None:
        rows = read_index(run)
        audio = np.fromfile(run / "audio.i16", np.int16)
        training = [row.start for row in rows if row.split == "train"]
        held_out = [row.start + row.samples for row in rows if row.split == "heldout"]
        self.first = max(held_out, default=0)
        assert self.first <= min(training), "held-out utterances come first"
        self.settings, self.frame_samples, self.device = settings, frame_samples, device
        self.size = settings.window_frames * frame_samples
        self.last = len(audio) - self.size
        starts = np.asarray([start for start in training if start <= self.last])
        self.starts = torch.from_numpy(starts).to(device)
        self.audio = torch.from_numpy(audio).to(device)
        self.offsets = torch.arange(self.size, device=device)
        self.phones = torch.from_numpy(np.fromfile(run / "phones.u8", np.uint8)).to(device)

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return audio [batch, samples] float32, a mask [batch, samples] of the samples to judge, and phones.

        Phones [batch, frames, PHONES_PER_FRAME] are the sounds in the middle of each part of a frame.
        """
        count = self.settings.batch
        starts = torch.randint(self.first, self.last + 1, (count,), device=self.device)
        begins = torch.rand(count, device=self.device) < self.settings.from_start
        aligned = self.starts[torch.randint(len(self.starts), (count,), device=self.device)]
        starts = torch.where(begins, aligned, starts)
        audio = self.audio[starts[:, None] + self.offsets].float() / _FULL_SCALE
        settled = self.offsets >= self.settings.unsettled_frames * self.frame_samples
        middles = self.offsets[PHONE_SAMPLES // 2 :: PHONE_SAMPLES]
        phones = self.phones[(starts[:, None] + middles) // PHONE_SAMPLES].long()
        return audio, begins[:, None] | settled, phones.view(len(phones), -1, PHONES_PER_FRAME)


class Training:
    """Contents of a checkpoint: networks, optimisers and the clock."""

    def __init__(self, run: Path, settings: CodecRecipe, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.directory = run / "codec"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.checkpoint = self.directory / "latest.pt"
        config = codec_config()
        self.model = CodecModel(config).to(device)
        self.discriminators = Discriminators().to(device)
        self.classifier = SoundClassifier(config.sample_rate).to(device)
        self.judges = nn.ModuleList((self.discriminators, self.classifier))
        self.encoded = (run / "codes.i16").exists()
        self.spectral = SpectralLoss(config.sample_rate).to(device)
        self.windows = Windows(run, settings, frame_samples=config.frame_samples, device=device)
        self.optimizer = _adam(self.model, settings.rate, device)
        self.judges_optimizer = _adam(self.judges, settings.judges_rate, device)
        self.dead = torch.tensor(settings.dead, device=device)
        self.step = 0
        self.elapsed_s = 0.0

    @property
    def progress(self) -> float:
        """Elapsed share of the time, 0 to 1."""
        return min(1.0, self.elapsed_s / (60 * self.settings.minutes))

    @property
    def _is_done(self) -> bool:
        settings = self.settings
        minutes = settings.minutes if self.encoded else min(settings.encoder_minutes, settings.minutes)
        return self.elapsed_s >= 60 * minutes

    def resume_or_start(self) -> None:
        """Load the latest checkpoint, or bare weights, or start the codebooks from the first batches."""
        if self.checkpoint.exists():
            self._load()
            logger.info(f"resuming at step {self.step}, {self.elapsed_s:.0f} s")
            return
        weights = self.directory / "weights.pt"
        if weights.exists():
            self.model.load_state_dict(torch.load(weights, map_location=self.device, weights_only=True)["model"])
            logger.info("starting from the weights of an earlier training")
            return
        first = torch.cat([self.windows.draw()[0] for _ in range(self.settings.first_batches)])
        self.model.initialise(first)

    def run(self) -> None:
        """Train until the time is over, and save every minute."""
        begin, before_s, first_step = time.perf_counter(), self.elapsed_s, self.step
        saved_s = self.elapsed_s
        step: Callable[[], Mapping[str, Tensor]] | None = None
        judged = False
        while not self._is_done:
            adversarial = self.progress >= self.settings.adversarial_from
            if step is None or adversarial != judged:
                step, judged = self._stepper(adversarial=adversarial), adversarial
            self._set_rates()
            losses = step()
            self.step += 1
            if self.step % self.settings.log_every == 0:
                values = {name: round(float(value), 4) for name, value in losses.items()}  # waits for the device
                since_s = time.perf_counter() - begin
                self._log(values, steps_per_s=(self.step - first_step) / since_s)
            self.elapsed_s = before_s + time.perf_counter() - begin
            if self.elapsed_s - saved_s > self.settings.save_every_s:
                saved_s = self.elapsed_s
                self.save()
        self.save()

    def _stepper(self, *, adversarial: bool) -> Callable[[], Mapping[str, Tensor]]:
        self._set_rates()
        step = partial(self.train_step, adversarial=adversarial)
        if self.device.type != "cuda":
            return step
        for stage in self.model.decoder.decoder:
            stage.compile(dynamic=False)
        return Captured(step)

    def train_step(self, *, adversarial: bool) -> Mapping[str, Tensor]:
        """Update the codec and, once they are used, the discriminators. Returns the losses on the device."""
        settings = self.settings
        audio, judged, phones = self.windows.draw()
        result = self.model(audio, phones, dead=None if self.encoded else self.dead)
        ours = torch.where(judged, result.audio, audio)
        mel, linear = self.spectral(ours, audio)
        loss = (
            settings.mel_weight * mel + settings.linear_weight * linear + settings.commitment_weight * result.commitment
        )
        losses = {"mel": mel.detach(), "linear": linear.detach(), "commitment": result.commitment.detach()}
        parts = self._slices(audio, ours) if adversarial else None
        losses["judges"] = self._train_judges(audio, phones, parts)
        self.judges.requires_grad_(requires_grad=False)
        if parts is not None:
            judgement = generator_loss(self.discriminators, *parts)
            loss = loss + settings.score_weight * judgement.score + settings.feature_weight * judgement.features
            losses |= {"score": judgement.score.detach(), "features": judgement.features.detach()}
        judgement = sound_loss(self.classifier, audio, ours, phones)
        loss = loss + settings.sound_weight * judgement.score + settings.sound_feature_weight * judgement.features
        losses |= {"sounds": judgement.score.detach(), "sound_features": judgement.features.detach()}
        self.judges.requires_grad_(requires_grad=True)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        losses["norm"] = nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        return losses

    def save(self) -> None:
        """Write the checkpoint and the weights, each to a temporary file that is then renamed."""
        state = {
            "model": self.model.state_dict(),
            "judges": self.judges.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "judges_optimizer": self.judges_optimizer.state_dict(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
        }
        for file, kept in ((self.checkpoint, state), (self.directory / "weights.pt", {"model": state["model"]})):
            torch.save(kept, file.with_suffix(".tmp"))
            file.with_suffix(".tmp").rename(file)

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.judges.load_state_dict(state["judges"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.judges_optimizer.load_state_dict(state["judges_optimizer"])
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        torch.manual_seed(self.step)  # selects windows that differ from earlier ones

    def _set_rates(self) -> None:
        settings = self.settings
        annealed = settings.final_rate + (1 - settings.final_rate) * (1 + math.cos(math.pi * self.progress)) / 2
        warm = min(1.0, (self.progress + 1e-4) / settings.warm_up)
        for optimizer, rate in (
            (self.optimizer, settings.rate),
            (self.judges_optimizer, settings.judges_rate),
        ):
            for group in optimizer.param_groups:
                group["lr"].fill_(rate * annealed * warm)
        if self.elapsed_s >= 60 * settings.encoder_minutes * settings.revive_until:
            self.dead.zero_()

    def _slices(self, audio: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
        """Return a random settled part of each window [B, samples], and the same part of its reconstruction."""
        settings, frame = self.settings, self.windows.frame_samples
        last = settings.window_frames - settings.judged_frames
        first = torch.randint(settings.unsettled_frames, last + 1, (len(audio), 1), device=audio.device)
        places = first * frame + torch.arange(settings.judged_frames * frame, device=audio.device)
        return audio.gather(1, places), ours.gather(1, places)

    def _train_judges(self, audio: Tensor, phones: Tensor, parts: tuple[Tensor, Tensor] | None) -> Tensor:
        """Train the classifier on recordings, and the discriminators on parts of recordings and reconstructions."""
        loss = F.cross_entropy(self.classifier(audio)[-1], phones.flatten(1))
        if parts is not None:
            loss = loss + discriminator_loss(self.discriminators, *parts)
        self.judges_optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        self.judges_optimizer.step()
        return loss.detach()

    def _log(self, values: Mapping[str, float], *, steps_per_s: float) -> None:
        perplexities = [round(value) for value in self.model.perplexities()]
        left_s = 60 * self.settings.minutes - self.elapsed_s
        row = {"step": self.step, "elapsed_s": round(self.elapsed_s, 1), **values, "perplexities": perplexities}
        with (self.directory / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = " ".join(f"{name} {value}" for name, value in values.items())
        logger.info(f"step {self.step} {shown} in use {perplexities} {steps_per_s:.1f}/s {left_s:.0f} s left")


def _adam(module: nn.Module, rate: float, device: torch.device) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    cuda = device.type == "cuda"
    return torch.optim.AdamW(
        parameters, torch.tensor(rate, device=device), betas=(0.8, 0.99), weight_decay=1e-3, fused=cuda, capturable=cuda
    )


@dataclass(frozen=True, slots=True)
class IndexRow:
    """A row of RUN/index.jsonl."""

    text: str
    voice: str
    start: int  # sample of RUN/audio.i16
    samples: int
    split: str  # "train" or "heldout"
    manner: str


def read_index(run: Path) -> list[IndexRow]:
    return [IndexRow(**json.loads(line)) for line in (run / "index.jsonl").read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def report(run: Path, model: CodecModel, device: torch.device, *, utterances: int) -> None:
    """Return the distances of held-out utterances, decoded by the served decoder, from their recordings."""
    decoder = served(model, device)
    spectral = SpectralLoss(model.config.sample_rate).to(device)
    audio = np.memmap(run / "audio.i16", np.int16, "r")
    phones = np.memmap(run / "phones.u8", np.uint8, "r")
    distances = []
    for row in [row for row in read_index(run) if row.split == "heldout"][:utterances]:
        recorded = audio[row.start : row.start + row.samples].astype(np.float32) / np.float32(_FULL_SCALE)
        sounds = phones[row.start // PHONE_SAMPLES :][: row.samples // PHONE_SAMPLES].reshape(1, -1, PHONES_PER_FRAME)
        heard = torch.from_numpy(recorded).to(device)[None], torch.from_numpy(sounds).long().to(device)
        ours, _ = decoder.decode(model.codes(*heard), [decoder.initial_state()])
        distances.append(float(spectral(ours, torch.from_numpy(recorded).to(device)[None])[0]))
    summary = {"held_out": len(distances), "log_mel_l1": float(np.mean(distances)), "worst": float(np.max(distances))}
    (run / "codec" / "report.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")
    logger.info(f"held out: {summary}")


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_voice.train_codec")
    parser.add_argument("run", type=Path)
    parser.add_argument("--minutes", type=float, default=14)
    parser.add_argument("--encoder-minutes", type=float, default=5, help="of these; the rest trains only the decoder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few small steps")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    settings = CodecRecipe(options.minutes, options.encoder_minutes)
    if options.smoke:
        settings = replace(settings, batch=2, first_batches=4, log_every=1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    training = Training(options.run, settings, device)
    training.resume_or_start()
    training.run()
    logger.info(f"trained {training.step} steps")
    torch.backends.cudnn.benchmark = False  # from here on, each utterance has a different length
    report(options.run, training.model, device, utterances=8 if options.smoke else 100)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
