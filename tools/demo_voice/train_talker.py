"""Train the talker and the code predictor on the encoded corpus, with known frames.

    python -m tools.demo_voice.train_talker RUN --minutes 8

The learning rate follows the elapsed time, so the training anneals completely on any machine.
A second call resumes from the last checkpoint. To start from an earlier talker, store its best.pt as
RUN/talker/weights.pt, and its tokenizer in RUN/talker/model.
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
from torch import Tensor
from torch.utils.data import DataLoader

from deployments.talker.model.model_config import ModelConfig
from deployments.talker.text.tokenizer import TextTokenizer
from talkray_tools.released import GENERATION, Json
from tools.demo_voice.dataset import Corpus, RowLayout, Sampler, written_ways
from tools.demo_voice.manners import turns
from tools.demo_voice.shape import PHONES_PER_FRAME, SHAPE
from tools.demo_voice.talker_trainer import BatchSource, Losses, TalkerRecipe, Trainer, batch_tensors
from tools.demo_voice.teacher_forcing import Guide
from tools.demo_voice.tokenizer import train_tokenizer

logger = logging.getLogger(__name__)

# The codebook is small and has a single teacher, so a penalty on repeated codes would degrade long speech. Speech was
# most intelligible at these temperatures.
VOICE_GENERATION: Json = {**GENERATION, "repetition_penalty": 1.0, "temperature": 0.3, "subtalker_temperature": 0.6}
# The talker has learned spoken-form English, and utterances of at most about twenty seconds.
TEXT_NEEDS: Json = {
    "spoken_form": "english",
    "follows_instructions": True,
    "max_segment_chars": 200,
    "alignment_head": [Guide.LAYER, Guide.HEAD],
}

_SEED = 20
_CHECK_BATCH = 100
_WORKERS = 8  # processes that prepare batches for a GPU
_SMOKE = TalkerRecipe(duration=15, max_rows=512, num_predicted=128, report_steps=2, save_every=4, check_every=6, ways=2)


def write_model_files(run: Path, corpus: Corpus) -> Path:
    """Write configuration and tokenizer to RUN/talker/model unless they exist, and return the folder."""
    directory = run / "talker" / "model"
    if not (directory / "vocab.json").exists():
        texts = [utterance.text for utterance in corpus.part("train")]
        train_tokenizer(directory, texts, num_tokens=SHAPE.text_tokens, assistant_token=SHAPE.assistant_token)
    if not (directory / "config.json").exists():
        write_json(directory / "generation_config.json", VOICE_GENERATION)
        write_json(directory / "config.json", {**SHAPE.config, "talkray": TEXT_NEEDS})
    return directory


def write_json(file: Path, value: object) -> None:
    """Write JSON in the format of the official layout's other files."""
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


class TrainingRun:
    """One run of this command."""

    def __init__(self, run: Path, settings: TalkerRecipe, *, device: torch.device) -> None:
        self.run, self.settings, self.device = run, settings, device
        self.checkpoint, self.best = run / "talker" / "checkpoint.pt", run / "talker" / "best.pt"
        corpus = Corpus.load(run)
        directory = write_model_files(run, corpus)
        config = ModelConfig.load(directory)
        self.config, self.tokenizer = config, TextTokenizer(directory, config.tokens)
        self.layout = RowLayout(config, self.tokenizer)
        self.held_out = corpus.part("heldout")
        self.trainer = Trainer(config, Losses(corpus, config, device), settings)
        if self.checkpoint.exists():
            self.trainer.load(self.checkpoint)
        elif (earlier := run / "talker" / "weights.pt").exists():
            self.trainer.start_from(earlier)
        training = corpus.part("train")
        ways = written_ways([utterance.text for utterance in training], self.tokenizer, ways=settings.ways, seed=_SEED)
        asking = turns(self.tokenizer, seed=_SEED)
        self.sampler = Sampler(training, self.layout, tokens=ways, turns=asking, full_text=settings.full_text)
        hours = sum(utterance.frames for utterance in training) / 12.5 / 3600
        logger.info("%d utterances, %.1f hours, from step %d", len(training), hours, self.trainer.steps)

    def train(self) -> None:
        trainer, settings = self.trainer, self.settings
        if trainer.progress >= 1:
            return
        before, saved, checked = trainer.seconds, trainer.seconds, trainer.seconds
        begin = reported = time.perf_counter()
        recent: list[Tensor] = []
        for batch in self._batches():
            recent.append(trainer.step(batch))
            trainer.seconds = before + time.perf_counter() - begin
            if trainer.steps % settings.report_steps == 0:
                rate = len(recent) / (time.perf_counter() - reported)
                self._report(recent, per_second=rate)
                recent, reported = [], time.perf_counter()
            if trainer.seconds - saved > settings.save_every:
                saved = trainer.seconds
                trainer.save(self.checkpoint)
            if trainer.seconds - checked > settings.check_every:
                checked = trainer.seconds
                self._check()
            if trainer.progress >= 1:
                break
        trainer.save(self.checkpoint)
        self._check()

    def _batches(self) -> Iterator[list[Tensor]]:
        source = BatchSource(self.sampler, self.settings, seed=(_SEED, self.trainer.steps))
        on_gpu = self.device.type == "cuda"
        workers: Json = {"num_workers": _WORKERS, "prefetch_factor": 8, "pin_memory": True} if on_gpu else {}
        yield from DataLoader(source, batch_size=None, **workers)

    def _check(self) -> None:
        """Measure the averaged weights on all held-out utterances, in both text modes, and keep the best weights."""
        modes = {mode: self._held_out(full_text=mode == "full_text") for mode in ("full_text", "streaming_text")}
        self._log({mode: _rounded(losses) for mode, losses in modes.items()})
        sounds = sum(losses[:PHONES_PER_FRAME].sum() for losses in modes.values())
        self.trainer.keep_best(float(sounds) / len(modes), self.best)

    def _held_out(self, *, full_text: bool) -> Tensor:
        """Return the losses [groups + 1], averaged over batches of similar length."""
        samples = [
            utterance.asked(self.tokenizer.encode(utterance.text), "english", full_text=full_text)
            for utterance in sorted(self.held_out, key=lambda utterance: utterance.frames)
        ]
        draw = np.random.default_rng(_SEED)
        losses = [
            self.trainer.held_out(batch_tensors(self.layout.batch(part), num_predicted=0, draw=draw))
            for part in (samples[first : first + _CHECK_BATCH] for first in range(0, len(samples), _CHECK_BATCH))
        ]
        return torch.stack(losses).mean(0)

    def _report(self, losses: list[Tensor], *, per_second: float) -> None:
        trainer = self.trainer
        left = trainer.settings.duration - trainer.seconds
        mean = torch.stack(losses).mean(0)
        self._log({"loss": _rounded(mean), "per_second": round(per_second, 1), "seconds_left": round(left)})

    def _log(self, values: dict[str, object]) -> None:
        line = json.dumps({"step": self.trainer.steps, "seconds": round(self.trainer.seconds), **values})
        logger.info("%s", line)
        with (self.run / "talker" / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")


def _rounded(losses: Tensor) -> list[float]:
    return [round(value, 3) for value in losses.tolist()]


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_voice.train_talker")
    parser.add_argument("run", type=Path, help="folder of the run, with codes")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--smoke", action="store_true", help="a few small steps, to test the command")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    settings = _SMOKE if options.smoke else TalkerRecipe(duration=options.minutes * 60)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it creates a plan for every shape, and batch shapes differ
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    TrainingRun(options.run, settings, device=device).train()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
