"""Speech without a teacher, while the talker is still being trained: does it stop, and when it should?"""

from dataclasses import dataclass

import numpy as np
import torch

from deployments.demo_voice.dataset import Utterance
from deployments.protocol import Codes, FinishReason, GenerateRequest, Sampling, SynthesisRequest
from deployments.talker.block_manager import BlockManager
from deployments.talker.input_tables import InputTables
from deployments.talker.kv_cache import KVCache
from deployments.talker.model.talker import Talker
from deployments.talker.model_runner import ModelRunner, RunnerShape
from deployments.talker.prompt import PromptBuilder
from deployments.talker.scheduler import Batch, Scheduler
from deployments.talker.sequence import FrameLimit, Sequence
from deployments.talker.tokenizer import TextTokenizer

_BLOCK = 16  # positions


@dataclass(frozen=True, slots=True)
class Spoken:
    """What became of one utterance."""

    frames: Codes
    length_ratio: float  # to the teacher's
    stopped: bool


def speak(talker: Talker, tokenizer: TextTokenizer, utterances: list[Utterance], *, sampling: Sampling) -> list[Spoken]:
    """Speak all utterances in a batch, every second with streaming text; long behind the teacher's end they are cut."""
    device, dtype = talker.codec_head.weight.device, talker.codec_head.weight.dtype
    tables = InputTables(talker)
    prompts = PromptBuilder(tables, tokenizer)
    sequences = [_sequence(prompts, number, utterance, sampling) for number, utterance in enumerate(utterances)]
    positions = sum(sequence.prompt.num_rows + sequence.limit.frames + _BLOCK for sequence in sequences)
    blocks = BlockManager(2 + positions // _BLOCK, _BLOCK)
    cache = KVCache(talker.config.talker, num_blocks=blocks.num_blocks, block_size=_BLOCK, dtype=dtype, device=device)
    longest = max(sequence.num_positions + sequence.limit.frames for sequence in sequences)
    runner = ModelRunner(tables, cache, blocks, RunnerShape(len(sequences), longest))
    scheduler = Scheduler(blocks, max_num_seqs=len(sequences), max_num_waiting=0)
    for sequence in sequences:
        scheduler.add(sequence)
    while (batch := scheduler.schedule()) is not None:
        _step(runner, batch, talker.config.codes.eos)
        scheduler.retire(batch)
    return [_spoken(sequence, utterance) for sequence, utterance in zip(sequences, utterances, strict=True)]


def _sequence(prompts: PromptBuilder, number: int, utterance: Utterance, sampling: Sampling) -> Sequence:
    asked = SynthesisRequest(
        f"check-{number}",
        utterance.text,
        voice=utterance.voice,
        language="english",
        seed=number,
        non_streaming_mode=number % 2 == 0,
    )
    request = GenerateRequest(asked)
    limit = FrameLimit(utterance.frames * 3 // 2 + 10, FinishReason.RUNAWAY)
    return Sequence(number, request, prompts.build(request), sampling, limit)


def _step(runner: ModelRunner, batch: Batch, eos: int) -> None:
    runner.prefill(batch.prefill)
    for sequence, frame in zip(batch.decode, runner.decode(batch.decode), strict=True):
        if frame[0] == eos:
            sequence.finish_reason = FinishReason.STOP
        else:
            sequence.append(frame)


def _spoken(sequence: Sequence, utterance: Utterance) -> Spoken:
    frames = np.stack(sequence.frames)
    return Spoken(frames, len(frames) / utterance.frames, sequence.finish_reason is FinishReason.STOP)


def summary(spoken: list[Spoken]) -> dict[str, float]:
    """Mean and largest deviation of the length ratio, and how many never stopped."""
    ratios = torch.tensor([utterance.length_ratio for utterance in spoken])
    return {
        "length_ratio": round(float(ratios.mean()), 3),
        "length_ratio_deviation": round(float(ratios.std(correction=0)), 3),
        "never_stopped": float(sum(not utterance.stopped for utterance in spoken)),
    }
