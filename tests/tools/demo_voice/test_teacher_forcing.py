from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deployments.protocol import FinishReason, SynthesisRequest
from deployments.talker.engine.startup import load_talker
from deployments.talker.model.input_tables import InputTables
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.model.talker import Talker
from deployments.talker.runner.model_runner import ModelRunner, RunnerShape, build_runner
from deployments.talker.runner.prefill import PrefillInputs, SequencePart
from deployments.talker.state.kv_cache import BlockManager, KVCache
from deployments.talker.state.sequence import FrameLimit, Sequence
from deployments.talker.text.prompt import PromptBuilder
from deployments.talker.text.tokenizer import TextTokenizer
from tools.demo_voice.dataset import END, NONE, CorpusUtterance, RowLayout, TrainingBatch, TrainingSample
from tools.demo_voice.teacher_forcing import input_rows, predictor_logits, talker_hidden

CPU = torch.device("cpu")
TEXTS = {"Hi.": 3, "Hello there, how are you?": 9, "A": 17}
ASKED = [
    (text, full_text, language, instructions)
    for text in TEXTS
    for full_text in (True, False)
    for language, instructions in (("english", None), (None, None), ("english", "Speak slowly."))
]


class Setting:
    def __init__(self, directory: Path) -> None:
        self.config = ModelConfig.load(directory)
        self.tokenizer = TextTokenizer(directory, self.config.tokens)
        self.talker: Talker = load_talker(directory, self.config, dtype=torch.float32, device=CPU)
        self.talker.prepare(max_positions=256)
        self.layout = RowLayout(self.config, self.tokenizer)
        draw = np.random.default_rng(0)
        shape = (sum(TEXTS[text] for text, *_ in ASKED), self.config.num_code_groups)
        self.codes = torch.from_numpy(draw.integers(self.config.code_vocab_size, size=shape))
        voice = next(iter(self.config.speakers))
        self.samples, start = [], 0
        for text, full_text, language, instructions in ASKED:
            utterance = CorpusUtterance(text, voice, "train", start, TEXTS[text])
            turn = self.tokenizer.encode_instructions(instructions) if instructions else ()
            self.samples.append(TrainingSample(utterance, self.tokenizer.encode(text), language, full_text, turn))
            start += TEXTS[text]
        self.batch: TrainingBatch = self.layout.batch(self.samples)

    def rows(self) -> Tensor:
        frames = torch.from_numpy(self.batch.frames)
        known = torch.where(frames[..., None] >= 0, self.codes[frames.clamp(min=0)], NONE)
        return input_rows(self.talker, torch.from_numpy(self.batch.text), torch.from_numpy(self.batch.codec), known)

    def frames(self, sample: TrainingSample) -> Tensor:
        return self.codes[sample.utterance.start :][: sample.utterance.frames]

    def runner_of(self, number: int, num_frames: int) -> tuple[ModelRunner, Sequence]:
        """An engine's runner, and a sequence of the sample's first frames that is ready to be prefilled."""
        sample = self.samples[number]
        request = SynthesisRequest(
            "test", sample.utterance.text, voice=sample.utterance.voice, language=sample.language or "auto",
            non_streaming_mode=sample.full_text, instructions=ASKED[number][-1],
        )  # fmt: skip
        tables = InputTables(self.talker)
        prompt = PromptBuilder(tables, self.tokenizer).build(request)
        prefix = list(self.frames(sample)[:num_frames].numpy().astype(np.int16))
        limit = FrameLimit(1000, FinishReason.LENGTH)
        sequence = Sequence(0, request, prompt, self.config.generation, limit, frames=prefix, row=0, frame_s=0.08)
        blocks = BlockManager(16, 16)
        blocks.allocate(0, sequence.num_positions + 1)
        cache = KVCache(self.config.talker, num_blocks=16, block_size=16, dtype=torch.float32, device=CPU)
        return build_runner(tables, cache, blocks, RunnerShape(1, 256, "exact")), sequence


@pytest.fixture(scope="module")
def setting(tiny_checkpoint: Callable[[str], Path]) -> Setting:
    return Setting(tiny_checkpoint("CustomVoice"))


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_rows_are_the_prompts_and_the_frames(setting: Setting, number: int) -> None:
    sample = setting.samples[number]
    runner, sequence = setting.runner_of(number, sample.utterance.frames)
    inputs = PrefillInputs(96, scratch_row=1, tables=runner.networks.tables)
    inputs.fill([SequencePart(sequence, 0, sequence.num_positions, is_last=True)])
    served = runner.networks.tables.rows(inputs.tensors.text_ids, inputs.tensors.codec_ids)[: sequence.num_positions]
    assert setting.layout.length(sample) == len(served)
    torch.testing.assert_close(setting.rows()[number, : len(served)], served, rtol=0, atol=1e-5)


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_hidden_states_are_the_engines(setting: Setting, number: int) -> None:
    sample = setting.samples[number]
    hidden = talker_hidden(setting.talker, setting.rows()).view(*setting.batch.targets.shape, -1)[number]
    first = int(np.flatnonzero(setting.batch.targets[number] != NONE)[0])
    for num_frames in (0, 1, sample.utterance.frames):
        runner, sequence = setting.runner_of(number, num_frames)
        runner.prefill([sequence])
        torch.testing.assert_close(hidden[first + num_frames], runner.state.hidden[0], rtol=0, atol=1e-4)


def test_targets_are_the_frames_in_their_order_and_then_the_end(setting: Setting) -> None:
    spoken = [sample.utterance for sample in setting.samples]
    expected = [number for each in spoken for number in (*range(each.start, each.start + each.frames), END)]
    assert setting.batch.targets[setting.batch.targets != NONE].tolist() == expected


def test_a_batch_is_filled_up_with_samples_that_are_not_learnt_from(setting: Setting) -> None:
    rows = setting.batch.text.shape[1]
    filled = setting.layout.batch(setting.samples, max_rows=(len(ASKED) + 2) * rows + 1)
    assert filled.text.shape == (len(ASKED) + 2, rows)
    assert (filled.targets[len(ASKED) :] == NONE).all()
    assert (filled.targets[: len(ASKED)] == setting.batch.targets).all()


def test_predictor_logits_are_those_of_one_codebook_after_the_other(setting: Setting) -> None:
    frames = setting.codes[:20]
    hidden = torch.randn(20, setting.config.talker.hidden_size, generator=torch.Generator().manual_seed(0))
    served: list[Tensor] = []

    def take(logits: Tensor, codebook: int) -> Tensor:
        served.append(logits)
        return frames[:, codebook]

    embed0 = setting.talker.model.codec_embedding(frames[:, 0])
    with torch.inference_mode():
        setting.talker.code_predictor(hidden, frames[:, 0], embed0, sample=take)
        logits = predictor_logits(setting.talker, hidden, frames)
    torch.testing.assert_close(logits, torch.stack(served, dim=1), rtol=0, atol=1e-4)
