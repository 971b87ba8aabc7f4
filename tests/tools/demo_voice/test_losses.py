from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deployments.talker.model.config import ModelConfig
from deployments.talker.tokenizer import TextTokenizer
from tools.demo_voice.dataset import NONE, Corpus, RowLayout, TrainingSample, Utterance
from tools.demo_voice.talker_trainer import DeviceBatch, Losses, TalkerRecipe, Trainer
from tools.demo_voice.teacher_forcing import Guide, Places

CPU = torch.device("cpu")
FRAMES = 12
SETTINGS = TalkerRecipe(duration=60)


class Setting:
    """One utterance of random frames, and a trainer for it."""

    def __init__(self, directory: Path) -> None:
        config = ModelConfig.load(directory)
        draw = np.random.default_rng(0)
        codes = draw.integers(config.code_vocab_size, size=(FRAMES, config.num_code_groups), dtype=np.int16)
        tokenizer = TextTokenizer(directory, config.tokens)
        utterance = Utterance("Hi.", next(iter(config.speakers)), "train", 0, FRAMES)
        sample = TrainingSample(utterance, tokenizer.encode("Hi."), None, full_text=True)
        self.losses = Losses(Corpus(codes, [utterance]), config, CPU)
        self.trainer = Trainer(config, self.losses, SETTINGS)
        batch = RowLayout(config, tokenizer).batch([sample])
        self.batch = DeviceBatch.of(batch, device=CPU, share=1.0, draw=draw)
        self.known: Tensor = self.losses.known(self.batch.frames)


@pytest.fixture(scope="module")
def setting(tiny_checkpoint: Callable[[str], Path]) -> Setting:
    torch.set_num_threads(1)
    return Setting(tiny_checkpoint("CustomVoice"))


def test_frames_are_hidden_whole(setting: Setting) -> None:
    torch.manual_seed(0)
    settings = replace(SETTINGS, hidden_frames=1.0, wrong_codes=0.0, wrong_frames=0.0)
    corrupted = setting.losses.corrupted(setting.known, settings)
    frames = setting.batch.frames >= 0
    hidden = (corrupted == NONE).all(-1) & frames
    assert 0 < hidden.sum() < frames.sum()
    assert torch.equal(corrupted[frames & ~hidden], setting.known[frames & ~hidden])


def test_training_lowers_every_loss(setting: Setting) -> None:
    before = setting.trainer.held_out(setting.batch)
    setting.trainer.seconds = 6.0  # behind the warm-up
    for _ in range(40):
        setting.trainer.step(setting.batch)
    assert (setting.trainer.held_out(setting.batch)[:-1] < before[:-1]).all()


def test_only_better_weights_are_kept(setting: Setting, tmp_path: Path) -> None:
    file = tmp_path / "best.pt"
    for held_out, kept in ((3.0, 3.0), (4.0, 3.0), (2.0, 2.0)):
        setting.trainer.keep_best(held_out, file)
        assert torch.load(file, weights_only=True)["held_out"] == kept


def test_reading_at_the_right_place_costs_least() -> None:
    length, text_first, count = 40, 4, 16
    rows = torch.arange(22, length)
    share = torch.linspace(0, 0.5, len(rows))
    same = torch.full_like(rows, 1)
    places = Places(rows, text_first * same, count * same, share)
    costs = []
    for distance in (0, 4, 8):
        read = (text_first + share * count).round().long() + distance
        keys = torch.eye(length)[None, None]
        query = torch.zeros(1, 1, length, length)
        query[0, 0, rows, read] = 100.0
        guide = Guide(places)
        guide.observe(Guide.LAYER, query, keys)
        costs.append(float(guide.loss))
    assert costs == sorted(costs)
    assert costs[0] < 0.1 < costs[1]


@pytest.mark.parametrize(("full_text", "first"), [(True, 2), (False, 0)])
def test_speech_that_knows_its_text_begins_with_one_frame_of_silence(full_text: bool, first: int) -> None:
    sample = Utterance("Hi.", "x", "train", 40, FRAMES).asked([1], None, full_text=full_text)
    assert (sample.utterance.start, sample.utterance.frames) == (40 + first, FRAMES - first)
    assert Utterance("Hi.", "x", "train", 40, 2).asked([1], None, full_text=full_text).utterance.frames == 2
