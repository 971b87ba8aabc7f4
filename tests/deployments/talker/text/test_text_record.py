"""How requests become rows of a prompt, and texts become tokens, whole and in parts."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.errors import TalkrayError
from deployments.protocol import (
    ClonePrompt,
    FinishReason,
    Mailbox,
    Progress,
    Reference,
    Sampling,
    SynthesisRequest,
    Tail,
)
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.input_processor import InputProcessor, LengthLimits
from deployments.talker.state.batch_state import BatchOptions, Breadth, DrawingOptions
from deployments.talker.state.sequence import Sequence
from deployments.talker.text.prompt import Prompt, PromptBuilder
from deployments.talker.text.tokenizer import IncrementalTokenizer
from tests.deployments.talker.driving import Recordings
from tests.records import Record

PIECES = [
    "Hello ",
    "don't",
    "  ",
    "\n\n",
    "12",
    "e\u0301",
    "囁き",
    "🙂",
    "...",
    "?!",
    " — ",
    "слово ",
    "<|im_end|>",
    "'s ",
    "a",
    "\u0301",
]


def told(prompt: Prompt) -> str:
    dense = None if prompt.dense is None else len(prompt.dense)
    lists = " | ".join(
        " ".join(map(str, each.tolist())) for each in (prompt.text_ids, prompt.codec_ids, prompt.trailing)
    )
    return (
        f"{prompt.num_text_tokens} tokens from {prompt.text_start}, dense {dense}, all {prompt.has_all_text}: {lists}"
    )


def drawn(draw: random.Random, kind: str, hidden: int) -> dict[str, Any]:
    changes: dict[str, Any] = {"text": "".join(draw.choices(PIECES, k=draw.randint(0, 5)))}
    changes["language"] = draw.choice(["auto", "chinese", "german"])
    changes["non_streaming_mode"] = draw.choice([None, True, False])
    if draw.random() < 0.4:
        changes["instructions"] = draw.choice(["Slowly.", " \nsoftly"])
    if draw.random() < 0.3:
        changes["tail"] = Tail(draw.choice(["before ", "前"]), np.full((draw.randint(1, 3), 16), 4, np.int16))
    if draw.random() < 0.2:
        changes["resume"] = Progress(np.full((draw.randint(1, 5), 16), 6, np.int16), 9)
    if draw.random() < 0.2:
        changes["following"] = ("x" * 30, draw.choice(["", "y" * 99, "ый " * 120]))
    if kind == "CustomVoice":
        changes["voice"] = draw.choice(["ryan", "eric", "dylan"])
    if kind == "Base":
        codes = np.full((draw.randint(1, 4), 16), 5, np.int16)
        prompt = ClonePrompt(np.ones(hidden, np.float32), draw.choice([codes, None]))
        samples = np.linspace(-0.5, 0.5, draw.choice([900, 12000]), dtype=np.float32)
        only = prompt.codes is None or draw.random() < 0.3
        changes["reference"] = Reference(
            None if draw.random() < 0.5 else samples,
            draw.choice([None, "Said. "]),
            x_vector_only=only,
            key=draw.randbytes(1) + b"0123456789abcdef",
        )
        if changes["reference"].audio is None:
            changes["reference"] = replace(changes["reference"], prompt=prompt)
    changes["sampling"] = Sampling(
        max_new_tokens=draw.choice([None, 1, 30]), top_k=draw.choice([None, 0, 7]), do_sample=draw.choice([None, False])
    )
    return changes


@pytest.mark.parametrize("kind", ["CustomVoice", "VoiceDesign", "Base"])
def test_prompts(engine_of: Callable[[str], Engine], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record, draw, engine = Record(), random.Random(kind), engine_of(kind)
    hidden = engine.model_config.talker.hidden_size
    for on_gpu in (False, True):
        recordings: Any = Recordings(
            lambda reference: ClonePrompt(
                np.ones(hidden, np.float32), None if reference.x_vector_only else np.full((2, 16), 7, np.int16)
            )
        )
        builder = PromptBuilder(
            engine.prompts.tables,
            engine.prompts.tokenizer,
            engine.prompts.speaker_encoder,
            recordings if on_gpu else None,
            follows_instructions=draw.random() < 0.7,
        )
        limits = LengthLimits(builder.tokenizer, max_positions=170, frame_s=0.08)
        inputs = InputProcessor(engine.info, builder, limits)
        for number in range(36):
            changes = drawn(draw, kind, hidden)
            request = SynthesisRequest("r", word_times=draw.random() < 0.5, ignore_eos=draw.random() < 0.2, **changes)
            facts = {
                name: value
                for name, value in changes.items()
                if name not in ("reference", "tail", "resume", "sampling")
            }
            record(
                f"-- {number}",
                facts,
                request.reference
                and (request.reference.text, request.reference.x_vector_only, request.reference.prompt is not None),
                request.tail and request.tail.text,
            )
            record("texts", builder.texts(request), builder.least_tokens(request))
            try:
                if (encoding := builder.start_encoding(request)) is not None and draw.random() < 0.7:
                    record("encoded")
                    request = builder.encoded(request, encoding)
                sequence, known = inputs.build_sequence(number, request), request
                assert sequence is not None
                told_of(record, sequence)
            except TalkrayError as error:
                record("  !", error, getattr(error, "code", None))
            live = replace(request, text="", mailbox=Mailbox("h", 1, "t"))
            parts = draw.choices(PIECES, k=3)
            try:
                inputs.build_sequence(1000 + number, live)
                for place, part in enumerate(parts):
                    if (grown := inputs.append_text(1000 + number, part, is_last=place == 2)) is not None:
                        record(
                            f"  live {place}: {told(grown.prompt)}",
                            grown.limit,
                            grown.awaits_text,
                            grown.progress.num_unspoken,
                        )
                record(
                    "  is open",
                    inputs.sequence(1000 + number) is not None,
                    inputs.append_text(1000 + number, "more", is_last=True),
                )
            except TalkrayError as error:
                record("  live !", error)
            inputs.close(1000 + number)
        with monkeypatch.context() as patched:
            patched.setattr(builder.talker, "embed_text", record.fake("projects again"))
            builder.build(known)
        record("lookups", builder.speakers.take_lookups(), builder.references.take_lookups(), len(recordings.started))
    record.check(f"prompts-{kind.lower()}")


def told_of(record: Record, sequence: Sequence) -> None:
    record(told(sequence.prompt))
    record(
        "  sequence",
        sequence.limit,
        sequence.sampling,
        sequence.num_positions,
        sequence.awaits_text,
        sequence.clone_prompt,
    )
    options = [DrawingOptions.for_talker(sequence.sampling), DrawingOptions.for_predictor(sequence.sampling)]
    record(
        "  draws",
        Breadth.of(options),
        *options,
        BatchOptions.of(options, device="cpu").ints("top_k").flatten().tolist(),
    )  # type: ignore[arg-type]


def test_tokens(engine_of: Callable[[str], Engine]) -> None:
    record, draw, tokenizer = Record(), random.Random(12), engine_of("CustomVoice").prompts.tokenizer
    for _ in range(120):
        text, gap = "".join(draw.choices(PIECES, k=draw.randint(0, 9))), draw.choice(["", " "])
        ids, places = tokenizer.encode_body(text, gap=gap)
        record(
            f"{text!r} after {gap!r}",
            ids,
            places,
            tokenizer.settled(text),
            tokenizer.num_unspoken(ids),
            tokenizer.least_tokens(text * 200),
        )
        if draw.random() < 0.2:
            tokenizer.encode_ahead(gap + text.lstrip())
            assert (ids, places) == tokenizer.encode_body(text, gap=gap)
        parts, rest = IncrementalTokenizer(tokenizer, gap=gap), text
        fed = []
        while rest:
            cut = draw.randint(1, 4)
            fed.append(parts.feed(rest[:cut], is_last=False))
            rest = rest[cut:]
        record("  in parts", fed, parts.feed("", is_last=True), parts.starts)
    record("instructed", tokenizer.encode_instructions(" \nslowly"), tokenizer.role)
    record.check("tokens")


@pytest.mark.parametrize("is_live", [False, True])
def test_speech_against_its_text(engine_of: Callable[[str], Engine], is_live: bool) -> None:
    """A sequence whose alignment head reads on, back, nothing, the whole text again, and far beyond the end."""
    record, draw, engine = Record(), random.Random(13), engine_of("CustomVoice")
    of_head = {}
    for head in (None, (0, 0)):
        prompts = PromptBuilder(engine.prompts.tables, engine.prompts.tokenizer)
        prompts.config = replace(prompts.config, text=replace(prompts.config.text, alignment_head=head))
        limits = LengthLimits(prompts.tokenizer, max_positions=400, frame_s=0.08)
        of_head[head] = InputProcessor(engine.info, prompts, limits)
    for number in range(60):
        head, sampling = draw.choice([*of_head]), Sampling(max_new_tokens=draw.choice([20, 500]))
        if reads_again := number % 4 == 3:
            head, sampling = (0, 0), Sampling(max_new_tokens=500)
        inputs = of_head[head]
        text = "".join(draw.choices(PIECES, k=14 if reads_again else draw.choice([1, 6, 12]))) + "a."
        asked = SynthesisRequest(
            "r", text, voice="ryan", word_times=draw.random() < 0.7, ignore_eos=draw.random() < 0.1, sampling=sampling
        )
        inputs.build_sequence(0, replace(asked, text="", mailbox=Mailbox("h", 1, "t")) if is_live else asked)
        sequence = (
            inputs.append_text(0, text, is_last=draw.random() < 0.8) if is_live else inputs.build_sequence(0, asked)
        )
        assert sequence is not None
        pace, goes_back, place, ends = (
            draw.choice([0.3, 1.0, 3.0]),
            draw.choice([0, 0, 14]),
            0.0,
            draw.choice([0.02, 0.2, 0.0]),
        )
        pace, ends = (1.0, 0.0) if reads_again else (pace, ends)
        record(f"-- {number} {text!r} head {head} {pace} a frame", sequence.limit, sequence.progress.num_unspoken)
        while sequence.finish_reason is None and sequence.num_frames < 150:
            if draw.random() < ends:
                sequence.end()
                break
            sequence.append(np.zeros(16, np.int16))
            place = place + pace if draw.random() > 0.05 else max(0.0, place - goes_back)
            place = 0.0 if reads_again and place > len(text.encode()) else place
            mass = draw.choice([0.5, 0.9, 0.2])
            if head:
                sequence.progress.read(mass, mass * place, sequence.prompt)
            if sequence.num_frames % 9 == 0:
                record(f"  {sequence.num_frames}", *(f"{char:.2f}" for char in sequence.progress.pop_places()))
        record(f"  {sequence.num_frames} frames: {sequence.finish_reason}", sequence.num_positions)
        if sequence.finish_reason is FinishReason.STOP:
            inputs.measure_pace(sequence)
    record.check(f"speech-{is_live}")
