from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deployments.talker.model.model_config import ModelConfig
from deployments.talker.text.tokenizer import TextTokenizer
from tools.demo_voice.dataset import NONE, Corpus, CorpusUtterance, RowLayout, TrainingSample
from tools.demo_voice.talker_trainer import DeviceBatch, Losses, TalkerRecipe, Trainer, batch_tensors
from tools.demo_voice.teacher_forcing import Guide, Places

CPU = torch.device("cpu")
FRAMES = 12
SETTINGS = TalkerRecipe(duration=60)


class Setting:
    def __init__(self, directory: Path) -> None:
        config = ModelConfig.load(directory)
        draw = np.random.default_rng(0)
        codes = draw.integers(config.code_vocab_size, size=(FRAMES, config.num_code_groups), dtype=np.int16)
        tokenizer = TextTokenizer(directory, config.tokens)
        utterance = CorpusUtterance("Hi.", next(iter(config.speakers)), "train", 0, FRAMES)
        sample = TrainingSample(utterance, tokenizer.encode("Hi."), None, full_text=True)
        self.losses = Losses(Corpus(codes, [utterance]), config, CPU)
        self.trainer = Trainer(config, self.losses, SETTINGS)
        self.sample, self.layout = sample, RowLayout(config, tokenizer)
        batch = self.layout.batch([sample])
        self.tensors = batch_tensors(batch, num_predicted=0, draw=draw)
        self.batch = DeviceBatch.of(self.tensors, CPU)
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
    before = setting.trainer.held_out(setting.tensors)
    setting.trainer.seconds = 6.0  # behind the warm-up
    for _ in range(40):
        setting.trainer.step(setting.tensors)
    assert (setting.trainer.held_out(setting.tensors)[:-1] < before[:-1]).all()
    assert all(parameter.is_leaf for parameter in setting.trainer.averaged.parameters())


def test_a_talker_begins_with_an_earlier_ones_weights(setting: Setting, tmp_path: Path) -> None:
    state = {name: tensor.half() for name, tensor in setting.trainer.averaged.state_dict().items()}
    rows = list(setting.layout.config.speakers.values())
    table = state["model.codec_embedding.weight"]
    table[rows[1:]] = 0  # voices that the earlier talker had not
    torch.save({"averaged": state}, tmp_path / "weights.pt")
    trainer = Trainer(setting.layout.config, setting.losses, SETTINGS)
    trainer.start_from(tmp_path / "weights.pt")
    for talker in (trainer.talker, trainer.averaged):
        started = talker.state_dict()["model.codec_embedding.weight"]
        assert torch.equal(started[rows], table[rows[:1]].float().expand(len(rows), -1))
        assert torch.equal(talker.codec_head.weight, state["codec_head.weight"].float())


def test_only_better_weights_are_kept(setting: Setting, tmp_path: Path) -> None:
    file = tmp_path / "best.pt"
    for held_out, kept in ((3.0, 3.0), (4.0, 3.0), (2.0, 2.0)):
        setting.trainer.keep_best(held_out, file)
        assert torch.load(file, weights_only=True)["held_out"] == kept


def test_reading_at_the_right_place_costs_least() -> None:
    length, text_first, count, first = 40, 4, 16, 22
    share, spoken = torch.zeros(1, length), torch.zeros(1, length, dtype=torch.bool)
    share[:, first:], spoken[:, first:] = torch.linspace(0, 0.5, length - first), True
    places = Places(torch.tensor([text_first]), torch.tensor([count]), share, spoken)
    costs = []
    for distance in (0, 4, 8):
        read = (text_first + share[0, first:] * count).round().long() + distance
        keys = torch.eye(length)[None, None]
        query = torch.zeros(1, 1, length, length)
        query[0, 0, torch.arange(first, length), read] = 100.0
        guide = Guide(places)
        guide.observe(Guide.LAYER, query, keys)
        costs.append(float(guide.loss))
    assert costs == sorted(costs)
    assert costs[0] < 0.1 < costs[1]


def test_text_beside_the_frames_guides_nothing(setting: Setting) -> None:
    nowhere = replace(setting.batch, text_count=torch.zeros(1, dtype=torch.int64))
    for batch, guided in ((setting.batch, True), (nowhere, False)):
        losses = setting.losses(setting.trainer.averaged, batch, setting.known)
        assert (losses[-1] > 0) == guided
        assert (losses[:-1] > 0).all()


def test_samples_that_fill_a_batch_up_change_no_loss(setting: Setting) -> None:
    filled = setting.layout.batch([setting.sample], max_rows=3 * setting.batch.text.shape[1])
    tensors = batch_tensors(filled, num_predicted=0, draw=np.random.default_rng(0))
    assert tensors[0].shape[0] == 3
    torch.testing.assert_close(setting.trainer.held_out(tensors), setting.trainer.held_out(setting.tensors))


@pytest.mark.parametrize(("full_text", "first"), [(True, 2), (False, 0)])
def test_speech_that_knows_its_text_begins_with_one_frame_of_silence(full_text: bool, first: int) -> None:
    sample = CorpusUtterance("Hi.", "x", "train", 40, FRAMES).asked([1], None, full_text=full_text)
    assert (sample.utterance.start, sample.utterance.frames) == (40 + first, FRAMES - first)
    assert CorpusUtterance("Hi.", "x", "train", 40, 2).asked([1], None, full_text=full_text).utterance.frames == 2
